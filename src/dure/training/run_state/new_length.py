"""Differences between a run that was given another length on the way, and one that had this length from the start."""

from dure.training.session.sample_order import SampleOrder


def differs_in_length(samples_seen: int, order: SampleOrder) -> list[str]:
    """Return declarations of what the earlier attempts did because the run was to end elsewhere.

    Args:
        samples_seen: Samples at which this attempt begins.
        order: Order of the samples.
    """
    left_over = samples_seen % order.epoch_samples % order.global_batch_size
    if not left_over:
        return []
    return [
        f"batches: the run had an end at {samples_seen:,} samples, after a batch of {left_over}; with its present "
        "length from the start, it would have divided this epoch into other batches"
    ]
