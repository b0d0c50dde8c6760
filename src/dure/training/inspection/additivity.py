"""Comparison of a loss for a group of samples with its parts: whether they add up, in value and in gradients."""

import contextlib
import copy
import functools
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dure.errors import TaskInvalid
from dure.records.sums import exact_sum
from dure.strategies.contract.batches import split_batch
from dure.torchcompat.modes import entered_autocasts
from dure.training.inspection.constant_draws import ConstantDraws, TooManyDraws
from dure.training.inspection.loss_calls import NUM_SAMPLES, LossCalls, Tried, Value, aside
from dure.training.inspection.model_outputs import OutputsAsLoss
from dure.training.inspection.rounded_alike import RoundedAlike

_PART_ENDS = (1 / 8, 1 / 2, 1)
"""Ends of the parts into which a group of samples is divided, as fractions."""
WIDE_SAMPLES = 256
"""Number of later samples on which only losses are compared, for rare cases: a mask that omits one in a hundred."""
WIDE_GROUP = 64
"""Maximum number of these samples at once."""
_WIDE_SECONDS = 1.0
"""Seconds within which their comparisons must begin."""
_LATE_SECONDS = 0.1
"""Seconds within which comparisons of further samples must begin, each time losses are compared during the run."""
_TOLERANCES = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
"""Relative rounding of a loss in parts, by its dtype; half precision and autocast round more."""
_OTHER_TOLERANCE = 5e-2
_ALIKE_TOLERANCE = 2e-3
"""Relative rounding of a loss of half precision whose model rounds each part as it does the whole; the loss may use
further modules, such as a teacher.
"""
_ROUNDED = 1e3
"""Size below which a gradient counts as rounding, in units of the eps of its dtype times the largest gradient norm."""

Compared = TypeVar("Compared")


@dataclass
class Additivity:
    """Comparisons of a loss with the losses of parts of its samples."""

    calls: LossCalls
    is_exact: bool = field(kw_only=True)
    """True if forward passes are in full precision; those that are not are compared in it if the loss accepts that."""
    is_divided: bool = field(default=True, kw_only=True)
    """True if the loss will see batches in parts; only then are many samples compared."""
    most_at_once: int = field(default=WIDE_GROUP, kw_only=True)
    """Number of samples per call in training, for which there is memory; if for one, two are tried."""
    has_random_batches: Callable[[], bool] = field(default=lambda: False, kw_only=True)
    """Function that returns whether random numbers were drawn for a batch, besides those of its samples."""
    smallest_part: int = field(default=1, kw_only=True)
    """Number of samples below which no part is: two for a loss that fails on one."""
    quantiles: tuple[float, ...] = field(default=(), kw_only=True)
    """Quantiles of the constants with which a loss that draws is compared; empty if a call takes too long."""

    def difference_of(self, places: range) -> str | None:
        """Return the figures of a loss whose parts do not add up, in value or gradients, or None.

        Args:
            places: Samples of the whole.
        """
        return self._in_full_precision(lambda exact: exact._difference_of(places))

    def difference_of_repeated(self, num_samples: int) -> str | None:
        """Return the figures of a loss that does not add up if samples occur twice in a batch, or None.

        A loss may treat samples apart until two have the same class or the same row of a table, as gradients do that an
        embedding scales by the frequency of its rows. Among few samples no two may be alike.

        Args:
            num_samples: Number of the first samples that are taken twice.
        """
        repeated = copy.copy(self)
        repeated.calls, fetch = copy.copy(self.calls), self.calls.fetch
        repeated.calls.fetch = lambda places: fetch([place % num_samples for place in places])
        try:
            figures = repeated.difference_of(range(2 * num_samples))
        except Exception:
            return None  # it may expect that samples differ
        return None if figures is None else f"{figures} (each sample twice)"

    def _in_full_precision(self, compare: Callable[["Additivity"], Compared]) -> Compared:
        """Compare without autocast, whose rounding hides differences; with it if the loss fails without."""
        with entered_autocasts(are_off=True) as autocasts:
            try:
                return compare(replace(self, is_exact=True))
            except Exception:
                if not autocasts:
                    raise
        return compare(replace(self, is_exact=False))

    def _difference_of(self, places: range) -> str | None:
        has_drawn, figures = self._compared(places)
        return self._difference_of_constants(places) if has_drawn or self.has_random_batches() else figures

    def _difference_of_constants(self, places: range) -> str | None:
        """Return the figures of a loss whose parts do not add up even with constant draws, or None."""
        for quantile in self.quantiles:
            has_drawn, figures = self._compared_with_constants(places, quantile)
            if has_drawn:
                return None  # by other means than torch's, so that the loss differs each time
            if figures is not None:
                return f"{figures} (with constants for its random numbers)"
        return None

    def _compared_with_constants(self, places: range, quantile: float) -> tuple[bool, str | None]:
        try:
            return self._compared(places, quantile)
        except (Exception, TooManyDraws):
            return False, None  # it expects random numbers

    def _compared(self, places: range, quantile: float | None = None) -> tuple[bool, str | None]:
        """Return whether the loss has drawn random numbers, and the figures of parts that do not add up, or None.

        Gradients of all samples and of one part are in memory at a time.

        Args:
            places: Samples of the whole.
            quantile: Quantile of constants in place of draws; None for draws.
        """

        def tried(some: range) -> Tried:
            return self.calls.tried(some, as_in_training=False, draws=_constants(quantile))

        whole = tried(places)
        rest = _GradientRest(whole.gradients)
        has_drawn, values = whole.trial.has_drawn, []
        for part in map(tried, _parts_of(places, self.smallest_part)):
            rest.subtract(part.gradients)
            values.append(part.value)
            has_drawn = has_drawn or part.trial.has_drawn
        figures = self._difference(whole.value, values) or self._figures(rest, whole.value)
        return has_drawn, figures if figures or has_drawn else self._fine_difference(places, quantile)

    def _fine_difference(self, places: range, quantile: float | None = None) -> str | None:
        """Return the figures of a loss whose parts do not add up by less than the model's rounding, or None.

        The model is called on the same parts each time, so that it rounds alike. This says nothing of the model itself.

        Args:
            places: Samples of the whole.
            quantile: Quantile of constants in place of draws; None for draws.
        """
        if self.tolerance(torch.float32) <= _ALIKE_TOLERANCE:
            return None
        parts = _parts_of(places, self.smallest_part)
        try:
            whole, again, *values = [
                self._rounded_alike(some, counts, quantile)
                for some, counts in (*[(places, [*map(len, parts)])] * 2, *((part, [len(part)]) for part in parts))
            ]
        except (Exception, TooManyDraws):
            return None  # it cannot be divided, or depends on the outputs' precision
        if whole.total != again.total or whole.dtype not in _TOLERANCES:
            return None
        return self._difference(whole, values, _ALIKE_TOLERANCE)

    def _rounded_alike(self, places: range, counts: Sequence[int], quantile: float | None) -> Value:
        calls = copy.copy(self.calls)
        calls.loss = RoundedAlike(self.calls.loss, counts)
        with _constants(quantile):
            return calls.value_apart(places)

    def is_model_additive(self, num_samples: int, size: int) -> bool:
        """Return whether the model's outputs for the first samples, and for the last, depend on no other samples.

        Args:
            num_samples: Number of available samples.
            size: Number of samples of each of the two batches.
        """
        outputs = copy.copy(self)
        outputs.calls = copy.copy(self.calls)
        outputs.calls.loss = OutputsAsLoss(self.calls.loss)
        for whole in (range(size), range(num_samples - size, num_samples)):
            # a model's call is divided by rows, so that padding to the longest sample is that of the whole batch
            outputs.calls.fetch = functools.partial(rows_of, self.calls.fetch, whole)
            try:
                if outputs.difference_of(whole) is not None:
                    return False
            except Exception:
                return False
        return True

    def difference_of_many(
        self, begin: int, end: int, seconds_each: float, started: float | None = None, most_seconds: float = 0.0
    ) -> tuple[str | None, int]:
        """Compare the loss of more samples with those of their parts, without gradients, while time remains.

        Args:
            begin: Place of the first sample.
            end: Place after the last sample.
            seconds_each: Maximum seconds per sample.
            started: Time from which the seconds are counted; None for now.
            most_seconds: Seconds that it may take in any case.

        Returns:
            The same as `late_difference`.
        """
        started = time.monotonic() if started is None else started
        affordable = int(_WIDE_SECONDS / (3 * max(seconds_each, 1e-9)))
        size = min(WIDE_GROUP, max(2, self.most_at_once), affordable)  # one sample has no parts
        if not self.is_divided or size < 2 or self.has_random_batches():
            return None, begin
        try:
            return self._in_full_precision(
                lambda exact: exact._difference_of_many(range(begin, end), size, started, most_seconds)
            )
        except Exception:
            return None, min(begin + size, end)  # training will raise it, or there is not enough memory

    def _difference_of_many(
        self, available: range, size: int, started: float, least_seconds: float
    ) -> tuple[str | None, int]:
        at, doubtful = available.start, range(0)
        with aside(), self.calls.trial_of_values():
            self.calls.set_modes(as_in_training=False)
            while at < available.stop - 1 and not doubtful:
                most_seconds = _WIDE_SECONDS if at < available.start + WIDE_SAMPLES else _LATE_SECONDS
                if time.monotonic() - started > max(most_seconds, least_seconds):
                    break
                places = range(at, min(at + size, available.stop))
                at = places.stop
                whole, *parts = [self.calls.value(part) for part in (places, *_parts_of(places, self.smallest_part))]
                if self._difference(whole, parts):
                    if self.is_other(whole, self.calls.value(places)):
                        break  # it draws, or depends on its own state, both of which are detected elsewhere
                    doubtful = places
        if doubtful:
            # again, each call from the same state: a counter of calls may have reached another phase in between
            whole, *parts = map(self.calls.value_apart, (doubtful, *_parts_of(doubtful, self.smallest_part)))
            return self._difference(whole, parts), at
        return None, at

    def late_difference(
        self, begin: int, num_samples: int, most_seconds: float = 0.0, gradients_at: int | None = None
    ) -> tuple[str | None, int]:
        """Compare the losses of samples with those of their parts, and gradients of the first of them, during the run.

        Args:
            begin: Place of the first sample.
            num_samples: Number of available samples.
            most_seconds: Seconds that it may take in any case; about a second if that is more.
            gradients_at: Place of the first sample whose gradients are compared; None for `begin`.

        Returns:
            Figures of a difference, or None, and the place after the last sample inspected.
        """
        started = time.monotonic()
        if figures := self.late_gradients(begin if gradients_at is None else gradients_at, num_samples):
            return figures, begin
        figures, end = self.difference_of_many(begin, num_samples, 0.0, started, most_seconds)
        # if there was no time for more, the next comparison goes on after these, and not with them again
        return figures, max(end, min(begin + NUM_SAMPLES, num_samples))

    def late_gradients(self, begin: int, num_samples: int) -> str | None:
        """Return the figures of a loss whose gradients, or values, do not add up over parts of a few samples, or None.

        Gradients of all samples and of one part are in memory at a time. Reducers of a strategy do not notice.

        Args:
            begin: Place of the first sample.
            num_samples: Number of available samples.
        """
        places = range(begin, min(begin + min(NUM_SAMPLES, max(2, self.most_at_once)), num_samples))
        if not self.is_divided or len(places) < 2 or self.has_random_batches():
            return None
        try:
            return self._in_full_precision(lambda exact: exact._late_gradients_of(places))
        except Exception:
            return None  # it draws, training will raise it, or there is not enough memory

    def _late_gradients_of(self, places: range) -> str | None:
        whole, gradients = self.calls.differentiated(places)
        rest = _GradientRest(gradients)
        values = []
        for part in _parts_of(places, self.smallest_part):
            value, gradients = self.calls.differentiated(part)
            values.append(value)
            rest.subtract(gradients)
        return self._difference(whole, values) or self._figures(rest, whole) or self._fine_difference(places)

    def _difference(self, whole: Value, parts: Sequence[Value], tolerance: float | None = None) -> str | None:
        """Return the figures of a loss that differs from that of its parts, or None.

        Args:
            whole: Loss of all samples at once.
            parts: Losses of the parts.
            tolerance: Relative difference that counts as rounding; None for that of the model and the loss.
        """
        if not (math.isfinite(whole.total) and math.isfinite(whole.items) and whole.items):
            return None
        total, count = exact_sum(part.total for part in parts), exact_sum(part.items for part in parts)
        tolerance = self.tolerance(whole.dtype) if tolerance is None else tolerance
        scale = exact_sum(abs(part.total) for part in parts)
        if abs(whole.total - total) <= tolerance * scale and abs(whole.items - count) <= tolerance * abs(count):
            return None
        return (
            f"it is {whole.total / whole.items:.6g} for {whole.num_samples} samples at once, and "
            f"{total / count if count else math.nan:.6g} for the same samples in {len(parts)} parts"
        )

    def _figures(self, rest: "_GradientRest", whole: Value) -> str | None:
        """Return the figures of gradients that do not add up although the losses do, or None."""
        return rest.figures(10 * self.tolerance(whole.dtype))  # a gradient is rounded more often than the loss

    def tolerance(self, dtype: torch.dtype) -> float:
        """Return the relative rounding of a loss of a dtype."""
        rounding = _TOLERANCES.get(dtype, _OTHER_TOLERANCE) if self.is_exact else _OTHER_TOLERANCE
        return max(rounding, tolerance_of(self.calls.model, is_exact=self.is_exact))

    def is_other(self, one: Value, other: Value) -> bool:
        """Return whether two losses, both finite, differ by more than rounding."""
        is_close = math.isclose(one.total, other.total, rel_tol=self.tolerance(one.dtype))
        return not is_close and math.isfinite(one.total + other.total)


class _GradientRest:
    """Rest of the gradients for all samples, from which those of parts are subtracted one after the other."""

    def __init__(self, gradients: dict[str, Tensor]) -> None:
        """Take the gradients for all samples, which are changed from now on."""
        self._rest = gradients
        self._scales = {name: float(gradient.norm()) for name, gradient in gradients.items()}
        """Sum of the norms of all gradients of a parameter."""
        self._largest = max(self._scales.values(), default=0.0)
        self._num_parts = 0

    def subtract(self, gradients: dict[str, Tensor]) -> None:
        """Subtract the gradients of a part, and release them."""
        self._num_parts += 1
        for name in self._rest.keys() & gradients.keys():
            self._scales[name] += float(gradients[name].norm())
            self._rest[name] = self._rest[name] - gradients.pop(name)
        gradients.clear()

    def figures(self, tolerance: float) -> str | None:
        """Return the figures of a parameter whose gradients do not add up over the parts, or None.

        Args:
            tolerance: Relative difference that counts as rounding.
        """
        for name, rest in self._rest.items():
            scale, difference = self._scales[name], float(rest.norm())
            if scale < _ROUNDED * torch.finfo(rest.dtype).eps * self._largest:
                continue  # it is zero: a layer before a softmax, or before a norm that subtracts its mean
            if math.isfinite(difference) and difference > tolerance * scale:
                return (
                    f"the gradient of {name} for all samples at once differs by {difference / scale:.2g} of its size "
                    f"from the sum over {self._num_parts} parts"
                )
        return None


def _parts_of(places: range, smallest: int) -> list[range]:
    """Split a group of samples into three unequal parts, or fewer if it is small.

    Args:
        places: Samples of the group.
        smallest: Minimum number of samples of a part.
    """
    parts, start = [], places.start
    for share in _PART_ENDS:
        end = places.start + max(smallest, round(len(places) * share))
        if end - start >= smallest and (end == places.stop or places.stop - end >= smallest):
            parts.append(range(start, end))
            start = end
    return parts or [places]


def _constants(quantile: float | None) -> AbstractContextManager[Any]:
    """Return a context in which random numbers are the constants of a quantile; one that does nothing for None."""
    return contextlib.nullcontext() if quantile is None else ConstantDraws(quantile)


def rows_of(fetch: Callable[[Sequence[int]], Any], whole: range, places: range) -> Any:
    """Return a part of a batch by its rows, or made of its samples if the batch cannot be divided.

    Args:
        fetch: Function that returns a batch of samples.
        whole: Samples of the batch.
        places: Samples of the part.
    """
    before, after = places.start - whole.start, whole.stop - places.stop
    try:
        parts = split_batch(fetch(whole), [count for count in (before, len(places), after) if count])
    except TaskInvalid:
        return fetch(places)
    return parts[1 if before else 0]


def tolerance_of(model: nn.Module, *, is_exact: bool) -> float:
    """Return the relative rounding of a loss, which is that of the least precise numbers it is computed from.

    Args:
        model: Model with the numbers.
        is_exact: Whether forward passes are in full precision.
    """
    numbers = {p.dtype for p in model.parameters() if p.is_floating_point() or p.is_complex()}
    found = max((_TOLERANCES.get(dtype, _OTHER_TOLERANCE) for dtype in numbers), default=0.0)
    return found if is_exact else _OTHER_TOLERANCE
