"""Facts of a step: its loss over all ranks, the contribution of each microbatch, and the ranks' requests."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dure.errors import TaskInvalid
from dure.host.device_kinds import copies_beside, waited_event

_LEAST_WEIGHT = 1e-6
"""Fraction of a count up to which a difference from a whole number is one of rounding."""


class Requests(NamedTuple):
    """Requests of a rank to all ranks, received with the step's facts so that all act at the same step."""

    stop: bool = False
    """Checkpoint and end: this rank received a signal."""
    save: bool = False
    """Checkpoint and go on: this rank's checkpoint interval has passed."""


NO_REQUESTS = Requests()


class DeferredRead:
    """Numbers of a tensor, which an accelerator copies to the host after the computations queued so far.

    `read` waits for these and for the copy, and for nothing that was queued later.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._event: torch.Event | None = None
        if numbers.device.type != "cpu":
            self._numbers = torch.empty(
                numbers.shape, dtype=numbers.dtype, pin_memory=copies_beside(numbers.device.type)
            )
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = waited_event(numbers.device)
            self._event.record()

    def read(self) -> list[float]:
        """Return the numbers of a tensor with one dimension."""
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()


class StepFacts:
    """Facts of a step over all ranks: loss sum, loss count and requests.

    On an accelerator the loop reads them one step late, so that the device never runs out of work.
    """

    def __init__(
        self,
        facts: Tensor | Sequence[float],
        terms: "Sequence[LossTerm]",
        *,
        is_local: bool = False,
        check: Callable[[Sequence[float]], None] | None = None,
    ) -> None:
        """Take `[loss sum, loss count, stop, save, ...]`, summed over ranks, and this rank's own terms.

        Args:
            facts: Facts, and further numbers for `check`.
            terms: Terms of the loss.
            is_local: Whether the facts are of this rank alone: no other rank knows them or waits for them.
            check: Called with the further numbers when the facts are read; it raises an exception if they are wrong.
        """
        self._check = check
        self.is_local = is_local
        self._terms = terms
        self._facts = DeferredRead(facts) if isinstance(facts, Tensor) else facts

    def is_locally_finite(self) -> bool:
        """Return whether this rank's own losses of the step were finite."""
        return all(bool(term.value.isfinite()) for term in self._terms)

    def read(self) -> tuple[float, float, Requests]:
        """Return loss sum, loss count and the requests."""
        values = self._facts.read() if isinstance(self._facts, DeferredRead) else self._facts
        loss_sum, count, stop, save, *further = values
        if self._check is not None:
            self._check(further)
        if isinstance(count, float) and math.isfinite(count) and self._counts_whole():
            whole = round(count)
            # it was converted to float32 on the way; if it is no whole number even so, another rank counts weights
            count = whole if abs(count - whole) <= _LEAST_WEIGHT * max(abs(count), 1.0) else count
        return loss_sum, count, Requests(stop > 0, save > 0) if stop or save else NO_REQUESTS

    def _counts_whole(self) -> bool:
        return bool(self._terms) and all(term.is_counted_whole for term in self._terms)


@dataclass(slots=True)
class LossTerm:
    """Loss of one microbatch: the tensor that backward starts from, and its share of the step's sum and count."""

    root: Tensor
    """Differentiable loss, weighted for this step, not yet scaled for fp16."""
    loss: Tensor
    """Loss as the task returned it; `loss * factor` is the loss summed over the items."""
    factor: float
    count: "Tensor | int | float"

    @property
    def value(self) -> Tensor:
        """Loss without its graph."""
        return self.loss.detach()

    @property
    def total(self) -> Tensor:
        """Loss summed over the items."""
        return self.value if self.factor == 1 else self.value * self.factor

    @property
    def is_counted_whole(self) -> bool:
        """Return whether the count is one of whole items; a sum of weights is not."""
        count = self.count
        return not (count.is_floating_point() if isinstance(count, Tensor) else isinstance(count, float))


@dataclass(frozen=True, kw_only=True, slots=True)
class LostShare:
    """Share of a batch that was not computed, because its rank died and the others went on."""

    rank: int
    step: int
    data_rank: int
    data_world_size: int
    is_partly_used: bool
    """True if some of the parameters were stepped with it."""


def checked_loss(value: object) -> Tensor:
    """Return the value that a task gave as its loss, or as the total of a `Sum`.

    Raises:
        TaskInvalid: It is not a scalar tensor from which backward can start.
    """
    if isinstance(value, Tensor) and value.requires_grad and value.dim() == 0:
        return value
    if not isinstance(value, Tensor) or value.dim() != 0:
        seen = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
        raise TaskInvalid(
            f"the task's loss returned {seen}: return a scalar tensor (the mean over the batch's samples) or "
            "dure.Sum(total, count) with a scalar tensor as total"
        )
    raise TaskInvalid(
        "the task's loss returned a tensor without a gradient: compute it from the model's output without "
        "detach(), .item() or no_grad(), and leave some parameter trainable"
    )


def checked_count(value: object) -> "Tensor | int | float":
    """Return the value that a task gave as the count of a `Sum`.

    Raises:
        TaskInvalid: It is not a number, or one through which the mean would have to be differentiated too.
    """
    if isinstance(value, Tensor) and value.requires_grad:
        raise TaskInvalid(
            "the task's loss returned dure.Sum with a count that requires a gradient, which only the total has: return "
            "count.detach() if that is meant, or a count that does not follow from the weights"
        )
    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0):
        return value
    if isinstance(value, np.generic):
        return value.item()  # type: ignore[no-any-return]
    seen = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
    raise TaskInvalid(f"the task's loss returned dure.Sum with {seen} as count: give one number, or a scalar tensor")
