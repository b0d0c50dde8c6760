"""Spans of a step, on the clock of the host or of the device."""

import operator
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from dure.host.device_kinds import has_timed_events, waited_event

Mark = float | torch.Event
"""Point in time within a step."""


class StepClock:
    """Clock that marks the ends of a step's spans, and reads them once the device has passed them.

    On the CPU a mark is `perf_counter`. On an accelerator work is queued, so the host's clock would measure queueing:
    there a mark is an event in the device's stream, read one step later, unless its events measure no time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        is_host = not has_timed_events(device.type)
        self.mark: Callable[[], Mark] = time.perf_counter if is_host else self._record_event
        """Function that marks the current point in time."""

    def _record_event(self) -> torch.Event:
        event: torch.Event = waited_event(self.device, enable_timing=True)
        event.record()
        return event

    @staticmethod
    def spans(marks: Sequence[Mark]) -> list[float]:
        """Return the seconds from each mark to the next; waits until the device has passed the last."""
        last = marks[-1]
        if isinstance(last, float):
            return list(map(operator.sub, marks[1:], marks))
        last.synchronize()
        return [StepClock.span(start, end) for start, end in pairwise(marks)]

    @staticmethod
    def span(start: Mark, end: Mark) -> float:
        """Return the seconds between two marks that the device has passed."""
        if isinstance(start, float):
            return end - start  # type: ignore[operator]
        return start.elapsed_time(end) / 1000  # type: ignore[arg-type]
