"""Spans of a step, on the host's clock or the device's."""

import time

import torch


class StepClock:
    """Marks the ends of a step's spans; reads them when the device has come past them.

    On the CPU a mark is `perf_counter`. On an accelerator work is queued, so the host's clock would measure queueing:
    there a mark is an event in the device's stream, read one step later.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_host = device.type not in ("cuda", "mps")
        self._device = device

    def mark(self) -> "float | torch.Event":
        """Mark this moment of the work."""
        if self._on_host:
            return time.perf_counter()
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    @staticmethod
    def seconds(start: "float | torch.Event", end: "float | torch.Event") -> float:
        """Return the seconds between two marks; waits for the device to come past the second."""
        if isinstance(start, float):
            assert isinstance(end, float)
            return end - start
        assert isinstance(end, torch.Event)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
