"""Partition of a number of samples: contiguous, complete, as even as requested."""

from collections.abc import Sequence


def shares(num_samples: int, num_parts: int, fractions: Sequence[float] | None = None) -> list[int]:
    """Return the number of samples of each part.

    Nothing is padded or omitted: the results always add up to `num_samples`. Without fractions the first `num_samples %
    num_parts` parts get one more than the others.

    Args:
        num_samples: Number of samples to divide.
        num_parts: Number of ranks, devices or microbatches.
        fractions: Wanted fraction of each part, adding up to 1; rounded by largest remainder. None for equal parts.
    """
    if fractions is None:
        even, rest = divmod(num_samples, num_parts)
        return [even + (part < rest) for part in range(num_parts)]
    wanted = [num_samples * fraction for fraction in fractions]
    counts = [int(value) for value in wanted]
    by_remainder = sorted(range(num_parts), key=lambda part: counts[part] - wanted[part])
    for part in by_remainder[: num_samples - sum(counts)]:
        counts[part] += 1
    return counts
