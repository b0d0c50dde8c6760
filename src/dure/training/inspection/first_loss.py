"""The loss of the first samples as each rank computes it: what depends on the rank shows before training."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FirstLoss:
    """The first samples' loss on one rank. JSON values only; None where it is not finite or could not be computed."""

    value: float | None = None
    """Sum over the samples, from one state of the random number generators."""
    gradient: float | None = None
    """Norm of its gradient."""
    tolerance: float = 0.0
    """Relative difference of a value that is rounding; that of the gradient is ten times as large."""


def difference_of_ranks(everyones: Sequence[FirstLoss]) -> str | None:
    """Return figures of a loss that is another one on another rank, or None.

    Args:
        everyones: By rank.
    """
    for name, what, factor in (("value", "it", 1), ("gradient", "the norm of its gradient", 10)):
        known = [(rank, value, one) for rank, one in enumerate(everyones) if (value := getattr(one, name)) is not None]
        for rank, value, one in known[1:]:
            first, other, _ = known[0]
            if abs(value - other) > factor * one.tolerance * max(abs(value), abs(other)):
                return f"{what} is {other:.6g} on rank {first} and {value:.6g} on rank {rank} for the same samples"
    return None
