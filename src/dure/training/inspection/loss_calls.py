"""Calls of a task's loss on its first samples, each in a trial that leaves no trace."""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dure.records.sums import Sum
from dure.strategies.contract.strategy import LossFunction
from dure.strategies.state.batchnorm import statistics_of
from dure.strategies.state.trial import Trial, is_equal
from dure.torchcompat.modules import BatchNorm, Dropout
from dure.training.inspection.call_watches import ChangesInForward

NUM_SAMPLES = 8
"""Number of samples of a group on which a loss is called."""


@dataclass
class LossCalls:
    """Task's loss with its model, samples and objects."""

    loss: LossFunction
    model: nn.Module
    """Whole model, on the device of the batches."""
    fetch: Callable[[Sequence[int]], Any]
    """Function that returns the batch of some of the first samples, by their places in the order of training."""
    objects: Mapping[str, object]
    """Objects in which the loss may keep state, by name."""
    autocast: Callable[[], AbstractContextManager[Any]]
    """Context of a forward pass."""
    watches_writes: bool = True
    """True if writes to parameters are seen operation by operation, which some losses do not support."""

    def __post_init__(self) -> None:
        self.forward = ChangesInForward(self.model, self.objects)
        """Changes by the model's own calls in the last call of the loss."""

    def tried(
        self,
        places: Sequence[int],
        *,
        as_in_training: bool,
        gradients: Mapping[str, Tensor] | None = None,
        scale: float = 1.0,
        draws: AbstractContextManager[Any] | None = None,
        keeps_caches: bool = False,
        perturbs: bool = False,
    ) -> "Tried":
        """Call the loss on some samples, and backward, in a trial.

        Args:
            places: Samples, by their places in the order of training.
            as_in_training: Whether BatchNorm and dropout are in training mode too.
            gradients: Gradients that parameters have before the call; None for none.
            scale: Factor on the loss before backward.
            draws: Context of fetch and call that replaces random numbers; None for none.
            keeps_caches: Whether caches of functions are left filled.
            perturbs: Whether all parameters are changed slightly before the call.
        """
        draws = draws or contextlib.nullcontext()
        with draws:
            batch = self.fetch(places)
        trial = Trial(self.model, self.objects, seed=0, watches_writes=self.watches_writes, keeps_caches=keeps_caches)
        with aside(), trial, draws:
            self.set_modes(as_in_training=as_in_training)
            if perturbs:
                perturb(self.model)
            for name, parameter in self.model.named_parameters():
                parameter.grad = gradients[name].clone() if gradients and name in gradients else None
            self.forward = ChangesInForward(self.model, self.objects)
            with torch.enable_grad(), self.autocast(), self.forward as forward:
                result = self.loss(self.model, batch)
            found = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
            tried = Tried(
                trial,
                Value.of(result, len(places)),
                {},
                forward,
                has_gradients=gradients is None and bool(found),
                has_changed_gradients=gradients is not None and not _are_equal(found, gradients),
                sparse=set(),
                # if it is not, and the loss has used it before, draws show it
                has_dropout=any(isinstance(m, Dropout) and m.training for m in self.model.modules()),
            )
            # in training mode too, because hooks and recomputation may draw
            tried.gradients.update(self._gradients(result, len(places), scale))
            named = self.model.named_parameters()
            tried.sparse.update(name for name, p in named if p.grad is not None and p.grad.is_sparse)
            return tried

    def differentiated(self, places: Sequence[int]) -> "tuple[Value, dict[str, Tensor]]":
        """Return the loss of some samples and its gradients, without hooks on gradients that parameters accumulate.

        A reducer has such hooks, and would wait for other ranks.

        Raises:
            ValueError: The loss draws random numbers.
        """
        batch = self.fetch(places)
        with aside(), self.trial_of_values() as trial:
            self.set_modes(as_in_training=False)
            with torch.enable_grad(), self.autocast():
                result = self.loss(self.model, batch)
            total = summed_over_items(result, len(places))
            trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
            found = torch.autograd.grad(total, [*trained.values()], allow_unused=True)
            gradients = {
                name: gradient.to_dense().clone()
                for name, gradient in zip(trained, found, strict=True)
                if gradient is not None
            }
        if trial.has_drawn:
            raise ValueError("a loss that draws random numbers differs each time")
        return Value.of(result, len(places)), gradients

    def value(self, places: Sequence[int]) -> "Value":
        """Return the loss of some samples; called within a trial."""
        batch = self.fetch(places)
        with torch.enable_grad(), self.autocast():
            return Value.of(self.loss(self.model, batch), len(places))

    def value_apart(self, places: Sequence[int]) -> "Value":
        """Return the loss of some samples, without gradients and in a trial of its own."""
        with aside(), self.trial_of_values():
            self.set_modes(as_in_training=False)
            return self.value(places)

    def trial_of_values(self) -> Trial:
        """Return a trial for the values of losses only: their writes are undone but not reported."""
        watches = None if self.watches_writes else False
        return Trial(self.model, self.objects, seed=2, watches_writes=watches, keeps_gradients=False)

    def set_modes(self, *, as_in_training: bool) -> None:
        """Put the model into training mode, without BatchNorm and dropout unless `as_in_training`."""
        self.model.train()
        if not as_in_training:
            for module in self.model.modules():
                if isinstance(module, (BatchNorm, Dropout)):
                    module.eval()

    def _gradients(self, result: Any, num_samples: int, scale: float) -> dict[str, Tensor]:
        """Return the gradients of a loss summed over its items and scaled; none if it has none."""
        total = summed_over_items(result, num_samples) * scale
        for parameter in self.model.parameters():
            parameter.grad = None
        try:
            total.backward()  # into `.grad`, because recomputation supports nothing else
        except Exception:
            return {}  # training will raise it
        named = self.model.named_parameters()
        return {name: p.grad.detach().to_dense().clone() for name, p in named if p.grad is not None}


class Value(NamedTuple):
    """Loss of some samples."""

    total: float
    items: float
    """Items over which the total is summed."""
    dtype: torch.dtype
    num_samples: int

    @classmethod
    def of(cls, result: Any, num_samples: int) -> "Value":
        """Convert the return value of the task's loss."""
        is_sum = isinstance(result, Sum)
        loss = torch.as_tensor(result.total if is_sum else result).detach()
        count = float(result.count) if is_sum else float(num_samples)
        return cls(float(loss.double()) * (1.0 if is_sum else num_samples), count, loss.dtype, num_samples)


class Tried(NamedTuple):
    """One call of the loss."""

    trial: Trial
    value: Value
    gradients: dict[str, Tensor]
    forward: ChangesInForward
    """Changes by the model's own calls."""
    has_gradients: bool
    """True if parameters without gradients had some when the loss returned."""
    has_changed_gradients: bool
    """True if existing gradients of parameters were different when the loss returned."""
    sparse: set[str]
    """Parameters whose gradients are sparse."""
    has_dropout: bool
    """True if a dropout layer was in training mode when the loss returned."""

    def buffers(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the changed buffers, except those of BatchNorm, which has its own trait."""
        known = statistics_of(model)
        return {name: value for name, value in self.trial.buffers.items() if name not in known}


def summed_over_items(result: Any, num_samples: int) -> Any:
    """Return the loss of some samples summed over its items."""
    return result.total if isinstance(result, Sum) else result * num_samples


def perturb(model: nn.Module, *, only_trained: bool = False) -> None:
    """Change all parameters slightly by random factors, or those that are trained; called within a trial."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and (parameter.requires_grad or not only_trained):
                parameter.mul_(1 + 0.01 * torch.rand_like(parameter))


def _are_equal(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(is_equal(tensor, others[name]) for name, tensor in some.items())


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Discard what a loss prints in a trial, because its output is shown once, in the step to which it belongs.

    Warnings that Python shows once for each line are shown in that step too. cuDNN does not time its algorithms for the
    sizes of a trial: that takes gigabytes, and longer than the trial itself.
    """
    times_algorithms = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        torch.backends.cudnn.benchmark = times_algorithms
        with warnings.catch_warnings():  # its end makes Python forget which warnings it has shown
            pass
