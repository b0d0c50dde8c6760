"""Count of the operations that a stretch of code calls (private in torch: its profiler without its output)."""

from typing import Any

import torch
from torch import autograd

_OPERATION = "aten::"


class OperationCount:
    """Count of the operations of this process between `begin` and `end`; those that one calls itself are part of it."""

    def __init__(self) -> None:
        self.is_on = False
        """True between `begin` and `end`; False if something else profiled this process."""

    def begin(self) -> None:
        """Begin to count, unless something else profiles this process."""
        if autograd._profiler_enabled() or self.is_on:
            return
        kinds = autograd.ProfilerState
        extra = torch._C._profiler._ExperimentalConfig()
        config = autograd.ProfilerConfig(kinds.CPU, False, False, False, False, False, extra)
        autograd._enable_profiler_legacy(config)
        self.is_on = True

    def end(self) -> int:
        """Return the number of operations since `begin`."""
        self.is_on = False
        return sum(map(_outermost, autograd._disable_profiler_legacy()))


def _outermost(events: list[Any]) -> int:
    """Return the number of operations of a thread that no other one called."""
    count, within, is_operation = 0, 0, list[bool]()
    for event in events:
        kind = event.kind()
        if kind == "push":
            starts = event.name().startswith(_OPERATION)
            count += starts and not within
            within += starts
            is_operation.append(starts)
        elif kind == "pop" and is_operation:
            within -= is_operation.pop()
    return count
