"""Count of a step's operations, and the time of the smallest: whether a step computes, or mostly calls."""

import time
from collections.abc import Callable

import torch

from dure.torchcompat.operations import OperationCount

AT_STEP = 5
"""Step whose operations are counted: caches, buckets and lazy state exist by then, and its time is not judged yet."""
_TRIALS = 5
_CALLS = 100


class StepOperations:
    """Count of the operations of one step, once."""

    def __init__(self, tell: Callable[[int, float], None]) -> None:
        """Prepare to count.

        Args:
            tell: Called once with the number of operations, and the seconds of one on a single number.
        """
        self._tell: Callable[[int, float], None] | None = tell
        self._count = OperationCount()

    def begin_step(self, number: int) -> None:
        """Begin to count, if that has not begun and this is the step, counted from the first one of this process."""
        if number == AT_STEP and self._tell is not None:
            self._count.begin()

    def end_step(self, number: int) -> bool:
        """Tell what was counted, if this was the step; return whether that took time."""
        if number < AT_STEP or self._tell is None:
            return False
        tell, self._tell = self._tell, None
        found = self._count.end()
        if found is not None:
            tell(found, seconds_of_smallest())
        return found is not None


def seconds_of_smallest() -> float:
    """Return the seconds of an operation on one number: what calling any operation takes at least."""
    number = torch.zeros(1)
    least = float("inf")
    for _ in range(_TRIALS):
        begun = time.perf_counter()
        for _ in range(_CALLS):
            number + 1
        least = min(least, (time.perf_counter() - begun) / _CALLS)
    return least
