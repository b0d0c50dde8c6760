"""Comparison of the loss of a whole batch with those of its parts, which shows effects that no smaller group has.

A loss that leaves out the worst twentieth of its samples leaves out none of ten. A model's own calls are compared too
if they are divided: an expert that takes a limited number of samples may have room for all of a device's.
"""

import copy
import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from dure.records.sums import exact_sum
from dure.strategies.contract.batches import split_batch
from dure.strategies.contract.strategy import LossFunction
from dure.torchcompat.modes import entered_autocasts
from dure.training.inspection.additivity import Additivity, rows_of
from dure.training.inspection.loss_calls import NUM_SAMPLES, Value, aside
from dure.training.inspection.model_outputs import OutputsAsLoss

_BEFORE_TRAINING_SECONDS = 1.0
_DURING_TRAINING_SECONDS = 0.1
_MOST_AT_ONCE = 8
"""Size of the largest batch that is computed at once without gradients, as a multiple of one with gradients: there is
memory for it, because activations are not kept.
"""


@dataclass(frozen=True)
class WholeBatch:
    """Comparison of the loss of one batch with those of the parts that a step computes."""

    additivity: Additivity
    counts: Sequence[int]
    """Samples of each part."""
    begin: int = 0
    """Place of the batch's first sample, in the order of training."""

    def difference(self, num_samples: int, *, is_training: bool = False) -> str | None:
        """Return the figures of a loss whose parts do not add up, or None; also if that would take too long.

        Args:
            num_samples: Number of available samples.
            is_training: Whether training waits for the result.
        """
        if sum(self.counts) <= NUM_SAMPLES or not self.additivity.is_divided:
            return None  # smaller groups show it
        return self.figures(num_samples, most_seconds=_seconds(is_training=is_training))

    def figures(self, num_samples: int, *, most_seconds: float) -> str | None:
        """Return the figures of a loss whose parts do not add up, for batches of any size.

        Args:
            num_samples: Number of available samples.
            most_seconds: Maximum seconds of the comparison; it is left out if it would take longer.
        """
        most = _MOST_AT_ONCE * max(NUM_SAMPLES, self.additivity.most_at_once, *self.counts)
        is_possible = sum(self.counts) <= min(num_samples - self.begin, most)
        if len(self.counts) < 2 or not is_possible or self.additivity.has_random_batches():
            return None
        try:
            with entered_autocasts(are_off=True):
                return self._difference(most_seconds)
        except Exception:
            return None  # it draws, needs gradients or autocast, or training will raise it

    def _difference(self, most_seconds: float) -> str | None:
        size, ends = sum(self.counts), [self.begin + end for end in accumulate(self.counts)]
        batch = range(self.begin, self.begin + size)
        places = [range(end - count, end) for count, end in zip(self.counts, ends, strict=True)]
        started = time.monotonic()
        first = self._value(places[0])
        seconds = time.monotonic() - started
        if seconds * (len(places) + size / len(places[0])) > most_seconds:
            return None
        parts = [first, *map(self._value, places[1:])]
        whole = self._value(batch)
        total, items = (exact_sum(each) for each in ([part.total for part in parts], [part.items for part in parts]))
        tolerance = replace(self.additivity, is_exact=True).tolerance(whole.dtype)
        scale = exact_sum(abs(part.total) for part in parts)
        is_same = abs(whole.total - total) <= tolerance * scale and abs(whole.items - items) <= tolerance * abs(items)
        if (
            is_same
            or not (items and math.isfinite(whole.total) and whole.items)
            or self.additivity.is_other(whole, self._value(batch))
        ):
            return None  # it differs each time by other means, which are detected elsewhere
        return (
            f"it is {whole.total / whole.items:.6g} for {size} samples at once, and {total / items:.6g} for the same "
            f"samples in {len(parts)} parts"
        )

    def _value(self, places: range) -> Value:
        calls = copy.copy(self.additivity.calls)
        calls.loss = _WithoutGradients(calls.loss)
        with aside(), calls.trial_of_values() as trial:
            calls.set_modes(as_in_training=False)
            value = calls.value(places)
        if trial.has_drawn:
            raise ValueError("a loss that draws random numbers differs each time")
        return value


@dataclass(frozen=True)
class DividedModel:
    """Comparison of a model's outputs for whole batches with those for the parts that devices compute."""

    additivity: Additivity
    counts: Sequence[int]
    """Samples of each device's part of a batch; empty if the model's calls are not divided."""

    def difference(self, begin: int, num_samples: int, *, is_training: bool = False) -> tuple[str | None, int]:
        """Compare batch after batch while time remains; during training, also the gradients of a few samples.

        Before training, comparisons of the loss show gradients of the model that depend on the batch.

        Args:
            begin: Place of the first sample, in the order of training.
            num_samples: Number of available samples.
            is_training: Whether training waits for the result.

        Returns:
            A description of a difference, or None, and the place after the last sample that was compared.
        """
        size, seconds = sum(self.counts), _seconds(is_training=is_training)
        started = time.monotonic()
        first = range(begin, min(begin + size, num_samples))
        while len(self.counts) > 1 and begin + size <= num_samples and time.monotonic() - started <= seconds:
            batch = WholeBatch(self._of_outputs(range(begin, begin + size)), self.counts, begin)
            begin += size
            if self._has_rows(batch.begin) and batch.figures(num_samples, most_seconds=seconds):
                return (
                    f"the model's outputs for {size} samples at once are others than for the same samples in "
                    f"{len(self.counts)} parts"
                ), begin
        if is_training and len(self.counts) > 1 and self._has_rows(first.start):
            return self._of_outputs(first).late_gradients(first.start, first.stop), begin
        return None, begin

    def _has_rows(self, begin: int) -> bool:
        """Return whether a batch is divided by samples; one of packed tokens is not, and its samples pack otherwise."""
        try:
            split_batch(self.additivity.calls.fetch(range(begin, begin + sum(self.counts))), self.counts)
        except Exception:
            return False
        return True

    def _of_outputs(self, batch: range) -> Additivity:
        outputs = copy.copy(self.additivity)
        outputs.calls = copy.copy(self.additivity.calls)
        outputs.calls.loss = OutputsAsLoss(self.additivity.calls.loss)
        # a model's call is divided by rows, so that padding to the longest sample is that of the whole batch
        outputs.calls.fetch = functools.partial(rows_of, self.additivity.calls.fetch, batch)
        return outputs


def _seconds(*, is_training: bool) -> float:
    return _DURING_TRAINING_SECONDS if is_training else _BEFORE_TRAINING_SECONDS


class _WithoutGradients:
    """Loss that is computed without gradients."""

    def __init__(self, loss: LossFunction) -> None:
        self._loss = loss

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        with torch.no_grad():
            return self._loss(model, batch)
