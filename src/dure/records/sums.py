"""Value with its weight: the only form in which dure averages anything."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


_SMALL = 2.0**-64
"""Factor with which as many numbers of any size as a list can hold are added without overflow."""


@dataclass(frozen=True, slots=True)
class Sum:
    """Total, and the number of items over which it was summed.

    Means of means are wrong as soon as two batches differ in size. A `Sum` has what is needed to combine batches,
    microbatches and ranks exactly: totals are added, counts are added, and one division comes last.

    Args:
        total: Sum of the values: a scalar tensor (differentiable if it is a loss) or a number.
        count: Number of items in the sum: samples, tokens, pixels, unmasked positions. It has no gradient.
    """

    total: "Tensor | float"
    count: "Tensor | int | float"


def exact_sum(values: Iterable[float]) -> float:
    """Return a sum, rounded once, that is independent of the order; infinity or NaN if there are such values."""
    numbers = list(values)
    if not all(map(math.isfinite, numbers)):
        return sum(number for number in numbers if not math.isfinite(number))
    try:
        return math.fsum(numbers)
    except OverflowError:
        return math.fsum(number * _SMALL for number in numbers) / _SMALL
