"""GPUs and their links, as reported by NVIDIA's management library (NVML).

No CUDA context is created, so forking stays safe. The library is passed as an object with `pynvml`'s names; tests pass
their own if there is no GPU.
"""

import importlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dure.host.gpu_health import (
    handle_at,
    recovery_action,
    slowdowns,
    text,
    uncorrected_errors,
    uuid_of,
    visible_positions,
)

_P2P_READ, _P2P_WRITE = 0, 1
"""`NVML_P2P_CAPS_INDEX_READ` and `_WRITE`; pynvml 13 has the first as a tuple, because of a stray comma."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """GPU that this process sees."""

    index: int
    """CUDA index in this process."""
    name: str
    uuid: str
    bus_id: str
    total_bytes: int
    free_bytes: int
    num_processes: int | None
    """Number of processes that compute on it now; None if the driver does not report it."""
    pcie_generation: int | None
    """Current PCIe generation, which drops while the GPU idles."""
    most_pcie_generation: int | None
    pcie_width: int | None
    most_pcie_width: int | None
    nvlink_version: str | None
    """Version of its active links; None if there are none."""
    nvlinks: dict[str, int]
    """Number of active links by their other end: `NVSwitch`, `GPU 3`, `CPU`, or `?`."""
    num_inactive_nvlinks: int
    is_persistent: bool | None
    has_ecc: bool | None
    num_uncorrected: int | None
    """Number of memory errors since the driver was loaded that ECC could not correct."""
    is_repair_pending: bool
    """True if rows of memory will be replaced at the next reset."""
    recovery_action: int | None
    """Recovery action that the driver requests; 0 for none, None if the driver does not report it."""
    slowed_by: tuple[str, ...]
    """Reasons why the hardware currently slows the GPU down."""
    compute_mode: str
    """`default`, `exclusive` or `prohibited`."""
    has_instances: bool
    """True if the GPU is divided (MIG)."""


@dataclass(frozen=True, kw_only=True)
class GpuPair:
    """Pair of GPUs of one host."""

    first: int
    second: int
    refusal: str | None
    """Reason why one cannot access the other's memory; None if it can."""
    path: str
    """Topology of the PCIe path between the two."""
    nvlinks: int
    """Number of active links between the two without a switch."""


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """NVML's report on this host."""

    why_none: str | None = None
    """Reason why there is no report; None if there is one."""
    is_broken: bool = False
    """True if the missing report is a fault, and not just a machine without GPUs."""
    is_lost: bool = False
    """True if there is no report because a GPU that this process sees is lost."""
    driver: str | None = None
    cuda_of_driver: str | None = None
    """Newest CUDA version that the driver supports."""
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[GpuPair, ...] = ()


def gpu_facts() -> GpuFacts:
    """Query NVML for every GPU that this process sees."""
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return GpuFacts(why_none="no NVIDIA driver")
        return GpuFacts(why_none=f"the NVIDIA driver does not work: {error}", is_broken=True)
    try:
        return _Reader(nvml).facts(os.environ.get("CUDA_VISIBLE_DEVICES"))
    except nvml.NVMLError as error:
        return GpuFacts(why_none=f"the NVIDIA driver does not answer: {error}", is_broken=True)
    finally:
        nvml.nvmlShutdown()


class _Reader:
    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml

    def facts(self, visible: str | None) -> GpuFacts:
        nvml = self.nvml
        everyone = [handle_at(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [uuid_of(nvml, handle) for handle in everyone]
        handles = [everyone[position] for position in visible_positions(visible, uuids)]
        lost = [str(index) for index, handle in enumerate(handles) if self._is_lost(handle)]
        if lost:
            names = f"GPU {', '.join(lost)} is lost and no longer answers on its bus"
            return GpuFacts(why_none=names, is_broken=True, is_lost=True)
        buses = [_bus(nvml.nvmlDeviceGetPciInfo(handle)) for handle in handles]
        gpus = [self._gpu(index, handle, buses) for index, handle in enumerate(handles)]
        version = self._asked(nvml.nvmlSystemGetCudaDriverVersion)
        return GpuFacts(
            driver=text(nvml.nvmlSystemGetDriverVersion()),
            cuda_of_driver=None if version is None else f"{version // 1000}.{version % 1000 // 10}",
            gpus=tuple(gpus),
            pairs=tuple(
                self._pair(first, second, handles, gpus)
                for first in range(len(handles))
                for second in range(first + 1, len(handles))
            ),
        )

    def _asked(self, question: Callable[..., Any], *about: Any) -> Any:
        """Return the result of a query, or None if this GPU or driver does not support it."""
        nvml = self.nvml
        try:
            return question(*about)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_UNINITIALIZED):
                raise
            return None

    def _is_lost(self, handle: Any) -> bool:
        nvml = self.nvml
        try:
            return handle is None or nvml.nvmlDeviceGetMemoryInfo(handle) is None
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                return True
            raise

    def _gpu(self, index: int, handle: Any, buses: Sequence[str]) -> Gpu:
        nvml = self.nvml
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        running = self._asked(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        persistence = self._asked(nvml.nvmlDeviceGetPersistenceMode, handle)
        ecc = self._asked(nvml.nvmlDeviceGetEccMode, handle)
        remapped = self._asked(nvml.nvmlDeviceGetRemappedRows, handle)
        instances = self._asked(nvml.nvmlDeviceGetMigMode, handle)
        version, links, num_inactive = self._nvlinks(handle, buses)
        return Gpu(
            index=index,
            name=text(nvml.nvmlDeviceGetName(handle)),
            uuid=text(nvml.nvmlDeviceGetUUID(handle)),
            bus_id=buses[index],
            total_bytes=int(memory.total),
            free_bytes=int(memory.free),
            num_processes=None if running is None else len(running),
            pcie_generation=self._asked(nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
            most_pcie_generation=self._asked(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            pcie_width=self._asked(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            most_pcie_width=self._asked(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            nvlink_version=version,
            nvlinks=links,
            num_inactive_nvlinks=num_inactive,
            is_persistent=None if persistence is None else persistence == nvml.NVML_FEATURE_ENABLED,
            has_ecc=None if ecc is None else ecc[0] == nvml.NVML_FEATURE_ENABLED,
            num_uncorrected=uncorrected_errors(nvml, handle),
            is_repair_pending=remapped is not None and bool(remapped[2]),
            recovery_action=recovery_action(nvml, handle),
            slowed_by=slowdowns(nvml, handle),
            compute_mode=self._compute_mode(handle),
            has_instances=instances is not None and bool(instances[0]),
        )

    def _nvlinks(self, handle: Any, buses: Sequence[str]) -> tuple[str | None, dict[str, int], int]:
        """Return the version of the active links, their other ends, and the number of inactive links."""
        nvml, ends, versions, num_inactive = self.nvml, Counter[str](), set(), 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            state = self._asked(nvml.nvmlDeviceGetNvLinkState, handle, link)
            if state is None:
                break  # this GPU has no such link, or none at all
            if state != nvml.NVML_FEATURE_ENABLED:
                num_inactive += 1
                continue
            versions.add(self._version(self._asked(nvml.nvmlDeviceGetNvLinkVersion, handle, link)))
            ends[self._far_end(handle, link, buses)] += 1
        return (max(versions) if versions else None), dict(ends), num_inactive

    def _version(self, number: int | None) -> str:
        nvml = self.nvml
        names = {
            getattr(nvml, name, None): name.removeprefix("NVML_NVLINK_VERSION_").replace("_", ".")
            for name in dir(nvml)
            if name.startswith("NVML_NVLINK_VERSION_") and not name.endswith("INVALID")
        }
        return names.get(number, "?") if number is not None else "?"

    def _far_end(self, handle: Any, link: int, buses: Sequence[str]) -> str:
        nvml = self.nvml
        kind = self._asked(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            return "NVSwitch"
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_IBMNPU:
            return "CPU"
        remote = self._asked(nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        bus = "" if remote is None else _bus(remote)
        return f"GPU {buses.index(bus)}" if bus in buses else "?"

    def _compute_mode(self, handle: Any) -> str:
        nvml = self.nvml
        words = {
            nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
            nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive",
            nvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: "exclusive",
        }
        return words.get(self._asked(nvml.nvmlDeviceGetComputeMode, handle), "default")

    def _pair(self, first: int, second: int, handles: Sequence[Any], gpus: Sequence[Gpu]) -> GpuPair:
        level = self._asked(self.nvml.nvmlDeviceGetTopologyCommonAncestor, handles[first], handles[second])
        return GpuPair(
            first=first,
            second=second,
            refusal=self._refusal(handles[first], handles[second]) or self._refusal(handles[second], handles[first]),
            path=self._path(level),
            nvlinks=gpus[first].nvlinks.get(f"GPU {second}", 0),
        )

    def _refusal(self, one: Any, other: Any) -> str | None:
        nvml = self.nvml
        for index in (_P2P_READ, _P2P_WRITE):
            try:
                status = nvml.nvmlDeviceGetP2PStatus(one, other, index)
            except nvml.NVMLError as error:
                return str(error)
            if status != nvml.NVML_P2P_STATUS_OK:
                return {
                    nvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED: "the chipset does not support it",
                    nvml.NVML_P2P_STATUS_GPU_NOT_SUPPORTED: "the GPU does not support it",
                    nvml.NVML_P2P_STATUS_IOH_TOPOLOGY_NOT_SUPPORTED: "no PCIe path between them supports it",
                    nvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY: "the driver's settings forbid it",
                    nvml.NVML_P2P_STATUS_NOT_SUPPORTED: "it is not supported",
                }.get(status, "the driver does not say why")
        return None

    def _path(self, level: int | None) -> str:
        nvml = self.nvml
        return {
            nvml.NVML_TOPOLOGY_INTERNAL: "on one board",
            nvml.NVML_TOPOLOGY_SINGLE: "over one PCIe switch",
            nvml.NVML_TOPOLOGY_MULTIPLE: "over several PCIe switches",
            nvml.NVML_TOPOLOGY_HOSTBRIDGE: "over a PCIe host bridge",
            nvml.NVML_TOPOLOGY_NODE: "within one NUMA node",
            nvml.NVML_TOPOLOGY_SYSTEM: "between CPU sockets",
        }.get(level, "not known")


def _bus(info: Any) -> str:
    return text(info.busId).lower()
