"""Count of the operations of a backward, and the time of the smallest: whether a step computes, or mostly calls."""

import time
from collections.abc import Callable

import torch

from dure.torchcompat.operations import OperationCount

_AT_BACKWARD = 5
"""Number of the backward whose operations are counted: buckets and lazy state exist by then."""
_TRIALS = 5
_CALLS = 100


class BackwardOperations:
    """Count of the operations of one early backward, once.

    Only the backward is counted, because no code of the user runs in it but hooks: a profiler of theirs cannot begin or
    end meanwhile, which torch would refuse.
    """

    def __init__(self, tell: Callable[[int, float], None]) -> None:
        """Measure the time of the smallest operation, and prepare to count.

        Args:
            tell: Called once with the number of operations, and the seconds of one on a single number.
        """
        self._tell = tell
        self._least_seconds = seconds_of_smallest()
        self._count = OperationCount()
        self._number = 0

    @property
    def is_over(self) -> bool:
        """Return whether it was counted, or something else profiled the process then."""
        return self._number >= _AT_BACKWARD and not self._count.is_on

    def begin(self) -> None:
        """Begin to count if this backward is the one to be counted; called before each."""
        self._number += 1
        if self._number == _AT_BACKWARD:
            self._count.begin()

    def end(self) -> None:
        """Tell what was counted, if this backward was; called after each."""
        if self._count.is_on:
            self._tell(self._count.end(), self._least_seconds)


def seconds_of_smallest() -> float:
    """Return the seconds of an operation on one number: what calling any operation takes at least."""
    number = torch.zeros(1, device="cpu")
    least = float("inf")
    for _ in range(_TRIALS):
        begun = time.perf_counter()
        for _ in range(_CALLS):
            number + 1
        least = min(least, (time.perf_counter() - begun) / _CALLS)
    return least
