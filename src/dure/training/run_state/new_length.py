"""Differences between a run that was given another length on the way, and one that had this length from the start."""

from collections.abc import Callable, Iterable

from dure.records.events import Event, Training
from dure.training.session.sample_order import SampleOrder


def differs_in_length(
    before: Iterable[Event],
    samples_seen: int,
    total_samples: int,
    order: SampleOrder,
    has_other_rates: Callable[[int, int], bool],
) -> list[str]:
    """Return declarations of what the earlier attempts did because the run was to end elsewhere.

    Args:
        before: Events of the earlier attempts.
        samples_seen: Samples at which this attempt begins.
        total_samples: Samples at which the run ends now.
        order: Order of the samples.
        has_other_rates: Returns whether a run of a length has other learning rates up to a position.
    """
    texts = []
    left_over = samples_seen % order.epoch_samples % order.global_batch_size
    if left_over:
        texts.append(
            f"batches: the run had an end at {samples_seen:,} samples, after a batch of {left_over}; with its present "
            "length from the start, it would have divided this epoch into other batches"
        )
    attempts = [event for event in before if isinstance(event, Training)]
    begins = [event.samples_seen for event in attempts[1:]] + [samples_seen]
    others = {
        event.total_samples: end
        for event, end in zip(attempts, begins, strict=False)
        if event.total_samples != total_samples and event.samples_seen < end
    }
    if any(has_other_rates(total, end) for total, end in others.items()):
        totals = " and ".join(f"{total:,}" for total in others)
        texts.append(
            f"learning rate: up to {max(others.values()):,} samples that of a schedule over {totals} samples, not over "
            f"{total_samples:,}"
        )
    return texts
