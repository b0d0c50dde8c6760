"""Differences between a run that was given another length on the way, and one that had this length from the start."""

from collections.abc import Iterable

from dure.records.events import Event, FactorsUsed
from dure.training.session.sample_order import SampleOrder
from dure.training.task.task import Schedule


class UsedFactors:
    """Factors of the schedule in some steps of this attempt: those whose number is a power of two, and the last."""

    def __init__(self) -> None:
        self._chosen: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._count = 0

    def noted(self, schedule: Schedule | None) -> Schedule | None:
        """Return the schedule with a record of its factors."""
        if schedule is None:
            return None

        def noting(samples_seen: int) -> float:
            factor = schedule(samples_seen)
            self._count += 1
            self._last = {samples_seen: factor}
            if not self._count & (self._count - 1):
                self._chosen[samples_seen] = factor
            return factor

        return noting

    def event(self, total_samples: int) -> FactorsUsed | None:
        """Return the event about the factors of an attempt that ends, or None if there was no schedule.

        Args:
            total_samples: Samples at which the run was to end.
        """
        used = {**self._chosen, **self._last}
        pairs = tuple((seen, float(factor)) for seen, factor in used.items())
        return FactorsUsed(total_samples=total_samples, factors=pairs) if pairs else None


def used_before(before: Iterable[Event], total_samples: int) -> dict[int, float]:
    """Return factors of the schedule in attempts that were to end elsewhere, by samples seen.

    Args:
        before: Events of the earlier attempts.
        total_samples: Samples at which the run ends now.
    """
    others = [each for each in before if isinstance(each, FactorsUsed) and each.total_samples != total_samples]
    return {seen: factor for event in others for seen, factor in event.factors}


def differs_in_length(samples_seen: int, order: SampleOrder, *, has_other_factors: bool) -> list[str]:
    """Return declarations of what the earlier attempts did because the run was to end elsewhere.

    Args:
        samples_seen: Samples at which this attempt begins.
        order: Order of the samples.
        has_other_factors: Whether the schedule of this length gives other factors for the steps of these attempts.
    """
    texts = []
    left_over = samples_seen % order.epoch_samples % order.global_batch_size
    if left_over:
        texts.append(
            f"batches: the run had an end at {samples_seen:,} samples, after a batch of {left_over}; with its present "
            "length from the start, it would have divided this epoch into other batches"
        )
    if has_other_factors:
        texts.append(
            "learning rate: in earlier attempts that of a schedule over another length; with its present length from "
            "the start, the run would have had other rates there"
        )
    return texts
