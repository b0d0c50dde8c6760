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
    known = [(rank, one) for rank, one in enumerate(everyones) if one.value is not None]
    for rank, one in known[1:]:
        if difference := _difference(known[0][1], one, f"on rank {known[0][0]}", f"on rank {rank}"):
            return difference
    return None


def difference_of_worlds(here: FirstLoss, alone: FirstLoss) -> str | None:
    """Return figures of a loss that is another one where the process is alone, or None.

    Args:
        here: With the run's ranks.
        alone: Without.
    """
    return _difference(here, alone, "here", "in one process")


def _difference(one: FirstLoss, other: FirstLoss, where: str, elsewhere: str) -> str | None:
    for name, what, factor in (("value", "it", 1), ("gradient", "the norm of its gradient", 10)):
        a, b = getattr(one, name), getattr(other, name)
        if a is not None and b is not None and abs(a - b) > factor * one.tolerance * max(abs(a), abs(b)):
            return f"{what} is {a:.6g} {where} and {b:.6g} {elsewhere} for the same samples"
    return None
