"""Use of the machine by a rank: its process and loaders by psutil, its GPUs by NVIDIA's management library (NVML)."""

import importlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dure.host.gpu_health import handle_at, slowdowns, uuid_of, visible_positions


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """State of a GPU at one moment; None for what the driver does not report."""

    device: int
    """Index in this process."""
    busy: float | None
    """Fraction of the last second or so in which it computed anything, from 0 to 1."""
    memory_bytes: int | None
    """Bytes that all processes use."""
    watts: float | None
    most_watts: float | None
    """Limit of the power."""
    megahertz: int | None
    """Clock of its multiprocessors."""
    most_megahertz: int | None
    slowed_by: tuple[str, ...] = ()
    """Reasons why the hardware slows it down, such as heat."""


@dataclass(frozen=True, kw_only=True)
class ProcessUse:
    """Use of the processor and the memory by a rank since the last look."""

    cores: float
    """Mean number of cores that the rank's own process used."""
    resident_bytes: int
    loaders: int
    """Number of processes that it has started, such as those of its loaders."""
    loader_cores: float
    loader_bytes: int


class ProcessMeter:
    """Meter of this process and of those that it has started."""

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._process.cpu_percent()
        self._children: dict[int, Any] = {}

    def read(self) -> ProcessUse:
        """Return the use since the last call, or since the start."""
        import psutil

        found = {child.pid: child for child in self._process.children(recursive=True)}
        # those that are known already have measured since the last call
        self._children = {pid: self._children.get(pid, child) for pid, child in found.items()}
        percent, num_bytes = 0.0, 0
        for child in self._children.values():
            with suppress(psutil.Error):  # it has ended meanwhile
                percent += child.cpu_percent()
                num_bytes += child.memory_info().rss
        return ProcessUse(
            cores=self._process.cpu_percent() / 100,
            resident_bytes=int(self._process.memory_info().rss),
            loaders=len(self._children),
            loader_cores=percent / 100,
            loader_bytes=int(num_bytes),
        )


class GpuMeter:
    """Meter of GPUs, whose driver stays open."""

    def __init__(self) -> None:
        """Open the driver.

        Raises:
            OSError: There is none, or it does not work.
        """
        self._nvml = importlib.import_module("pynvml")
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise OSError(str(error)) from error

    def read(self, devices: Sequence[int]) -> tuple[GpuUse, ...]:
        """Return the use of GPUs by their indices in this process, except of those that the driver does not know."""
        nvml = self._nvml
        try:
            handles = [handle_at(nvml, position) for position in range(nvml.nvmlDeviceGetCount())]
            uuids = [uuid_of(nvml, handle) for handle in handles]
            positions = visible_positions(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
            known = [(device, handles[positions[device]]) for device in devices if device < len(positions)]
            return tuple(self._use(device, handle) for device, handle in known if handle is not None)
        except nvml.NVMLError:
            return ()

    def _use(self, device: int, handle: Any) -> GpuUse:
        nvml = self._nvml
        rates = self._asked("nvmlDeviceGetUtilizationRates", handle)
        memory = self._asked("nvmlDeviceGetMemoryInfo", handle)
        power = self._asked("nvmlDeviceGetPowerUsage", handle)
        most_power = self._asked("nvmlDeviceGetEnforcedPowerLimit", handle)
        return GpuUse(
            device=device,
            busy=None if rates is None else rates.gpu / 100,
            memory_bytes=None if memory is None else int(memory.used),
            watts=None if power is None else power / 1000,
            most_watts=None if most_power is None else most_power / 1000,
            megahertz=self._asked("nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            most_megahertz=self._asked("nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
            slowed_by=slowdowns(nvml, handle),
        )

    def _asked(self, name: str, *about: Any) -> Any:
        try:
            return getattr(self._nvml, name)(*about)
        except self._nvml.NVMLError:
            return None

    def close(self) -> None:
        """Close the driver."""
        with suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()
