"""Loss made of a model's outputs, which shows whether parts of a batch add up in the model's own calls."""

from typing import Any

import torch
from torch import Tensor, nn

from dure.records.sums import Sum
from dure.strategies.contract.strategy import LossFunction
from dure.strategies.state.containers import tensors_in


class OutputsAsLoss:
    """Weighted sum over the outputs of all calls that a loss makes of its model.

    Parts of a batch add up if each sample's outputs, and their gradients, do not depend on the other samples.
    """

    def __init__(self, loss: LossFunction) -> None:
        self._loss = loss

    def __call__(self, model: nn.Module, batch: Any) -> Sum:
        """Call the loss, and return the sum over the model's outputs instead of its value."""
        outputs: list[Tensor] = []
        handle = model.register_forward_hook(lambda _, __, output: outputs.extend(tensors_in(output)))
        try:
            self._loss(model, batch)
        finally:
            handle.remove()
        # a scalar is no row of a sample: strategies that divide calls refuse it unless it is the same in each part
        rows = [output for output in outputs if _is_computed(output) and output.dim()]
        return Sum(sum(map(_weighted, rows)), sum(output.numel() for output in rows))


def _is_computed(output: Tensor) -> bool:
    """Return whether an output depends on parameters; without gradients, whether it may."""
    return output.requires_grad or (not torch.is_grad_enabled() and output.is_floating_point())


def _weighted(output: Tensor) -> Tensor:
    """Return the sum over an output's elements of a bent function of each, weighted by its place within its row.

    It is bent, so that a mean over samples that is subtracted from each is seen; slightly, so that large values do not
    hide small ones; and finite where an output is not, as for masked scores.
    """
    rows = output.reshape(len(output), -1)
    if not rows.is_complex():
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        most = torch.finfo(rows.dtype).max
        rows = rows.clamp(-most, most).asinh()
    places = torch.arange(1, rows.shape[1] + 1, device=output.device)
    return (rows * places.cos().to(rows.dtype)).sum()
