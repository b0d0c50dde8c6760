"""Samples of how a rank uses its machine, by a thread that wakes up every few seconds."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dure.host.device_kinds import current_index, device_kind
from dure.host.devices import accelerator
from dure.host.usage import GpuMeter, ProcessMeter
from dure.own_files import open_own
from dure.records.usage import usage_line

if TYPE_CHECKING:
    import torch

SECONDS = 10.0
"""Seconds between two samples. One takes a millisecond or two of a thread."""


def gpus_of(devices: Sequence["torch.device"]) -> tuple[int, ...]:
    """Return the indices of the devices that NVML knows."""
    return tuple(device.index or 0 for device in devices if device_kind(device.type).has_nvml)


def current_gpus() -> tuple[int, ...]:
    """Return the index of the device that this thread's process uses, if NVML knows it; none before it uses one."""
    kind = accelerator()
    if kind is None or not device_kind(kind).has_nvml:
        return ()
    index = current_index()
    return () if index is None else (index,)


class UsageSampler:
    """Sampler of this process, as long as its context is open."""

    def __init__(self, path: Path, gpus: Callable[[], Sequence[int]], seconds: float = SECONDS) -> None:
        """Prepare the thread.

        Args:
            path: File to append to.
            gpus: Function that returns the indices of this rank's GPUs that NVML knows; none for other devices.
            seconds: Seconds between two samples.
        """
        self._path = path
        self._gpus = gpus
        self._seconds = seconds
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="dure-usage", daemon=True)

    def start(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __enter__(self) -> Self:
        """Start the thread."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the thread end; a driver that does not answer is not waited for."""
        self.close()

    def close(self) -> None:
        """End the samples."""
        self._is_over.set()

    def _append(self, line: str) -> None:
        descriptor = open_own(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def _sample(self) -> None:
        try:
            process = ProcessMeter()
            meter: GpuMeter | None = None
            while not self._is_over.wait(self._seconds):
                gpus = self._gpus()
                if gpus and meter is None:
                    meter = GpuMeter()
                used = () if meter is None else meter.read(gpus)
                self._append(usage_line(time.time(), process.read(), used))
            if meter is not None:
                meter.close()
        except Exception:  # no driver, no space, a process that hides: training goes on without these records
            return
