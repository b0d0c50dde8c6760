"""Loss of a batch, and of its parts, computed from the same outputs: a model of half precision rounds them alike."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from dure.strategies.contract.batches import map_tensors, split_batch
from dure.strategies.contract.strategy import LossFunction
from dure.strategies.division.gathering import gather


class RoundedAlike:
    """Loss that calls the model on parts of a batch, and gets their outputs joined and in single precision."""

    def __init__(self, loss: LossFunction, counts: Sequence[int]) -> None:
        """Wrap a loss.

        Args:
            loss: The loss.
            counts: Samples of each part.
        """
        self._loss = loss
        self._counts = counts

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        """Call the loss.

        Raises:
            TaskInvalid: What the model takes or returns cannot be divided by samples.
        """
        own, forward = vars(model).get("forward"), model.forward
        device = next(model.parameters()).device

        def in_parts(*args: Any, **kwargs: Any) -> Any:
            outputs = [forward(*part, **named) for part, named in split_batch((args, kwargs), self._counts)]
            return map_tensors(gather(outputs, device, self._counts), _in_single_precision)

        model.forward = in_parts
        try:
            return self._loss(model, batch)
        finally:
            if own is None:
                del model.forward
            else:
                model.forward = own


def _in_single_precision(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor
