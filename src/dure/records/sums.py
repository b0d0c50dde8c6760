"""A value with its weight: the only form in which dure averages anything."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


_SMALL = 2.0**-64
"""Factor by which as many numbers of any size are added without an overflow as a list can hold."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A total and the number of items it was summed over.

    Means of means are wrong as soon as two batches differ in size. A `Sum` keeps what is needed to
    combine batches, microbatches and ranks exactly: totals add, counts add, and one division comes last.

    Args:
        total: The summed value: a scalar tensor (differentiable when it is a loss) or a number.
        count: How many items are in it: samples, tokens, pixels, unmasked positions.
    """

    total: "Tensor | float"
    count: "Tensor | int | float"


def exact_sum(values: Iterable[float]) -> float:
    """Return a sum, rounded once, that does not depend on the order; infinite, or no number, where that is so."""
    numbers = list(values)
    if not all(map(math.isfinite, numbers)):
        return sum(number for number in numbers if not math.isfinite(number))
    try:
        return math.fsum(numbers)
    except OverflowError:
        return math.fsum(number * _SMALL for number in numbers) / _SMALL
