"""Loss of the first samples as each rank computes it, to find a dependence on the rank before training."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FirstLoss:
    """Loss of the first samples on one rank, as JSON values; None if not finite or if it could not be computed."""

    num_samples: int = 0
    """Number of samples, of which a rank with less memory takes fewer."""
    value: float | None = None
    """Sum over the samples, computed from one fixed state of the random number generators."""
    gradient: float | None = None
    """Norm of the sum's gradient."""
    tolerance: float = 0.0
    """Relative difference of a value that counts as rounding; ten times as much for the gradient."""


def difference_of_ranks(by_rank: Sequence[FirstLoss]) -> str | None:
    """Return how the loss differs between ranks, or None.

    Args:
        by_rank: First losses by rank.
    """
    known = [(rank, one) for rank, one in enumerate(by_rank) if one.value is not None]
    for rank, one in known[1:]:
        if difference := _difference(known[0][1], one, f"on rank {known[0][0]}", f"on rank {rank}"):
            return difference
    return None


def difference_of_worlds(here: FirstLoss, in_one_process: FirstLoss) -> str | None:
    """Return how the loss differs if the process is alone, or None.

    Args:
        here: First loss among the run's ranks.
        in_one_process: First loss in one process.
    """
    return _difference(here, in_one_process, "here", "in one process")


def _difference(one: FirstLoss, other: FirstLoss, where: str, elsewhere: str) -> str | None:
    for name, what, factor in (("value", "it", 1), ("gradient", "the norm of its gradient", 10)):
        a, b = getattr(one, name), getattr(other, name)
        is_comparable = a is not None and b is not None and one.num_samples == other.num_samples
        if is_comparable and abs(a - b) > factor * one.tolerance * max(abs(a), abs(b)):
            return f"{what} is {a:.6g} {where} and {b:.6g} {elsewhere} for the same samples"
    return None
