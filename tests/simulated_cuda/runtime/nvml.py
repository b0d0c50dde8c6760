"""NVIDIA's management library (NVML), by the names of `pynvml`, about the simulated devices.

`SIMULATED_NVML` is `0` where the library is not installed. Otherwise it may be a JSON object of what is to be reported:
`driver` and `cuda` of the host, and of a device, by its number, `free`, `processes`, `mode`, `uncorrected`, `action`,
`slowed` and `lost`.
"""

import json
import os
from types import ModuleType, SimpleNamespace
from typing import Any

TOTAL_LINKS = 2
"""NVLinks of each device, to a switch."""


def show(core: ModuleType) -> None:
    """Replace the functions of `pynvml`; those that are not here report that the driver does not support them."""
    import pynvml

    nvml = Library(core, pynvml)
    for name in dir(pynvml):
        if name.startswith("nvml") and name[4].isupper() and callable(getattr(pynvml, name)):
            setattr(pynvml, name, getattr(nvml, name, nvml.unsupported))


def is_installed() -> bool:
    """Return whether the library is there."""
    return os.environ.get("SIMULATED_NVML") != "0"


class Library:
    """The driver's side. A handle is the number of a device."""

    def __init__(self, core: ModuleType, pynvml: ModuleType) -> None:
        self._core = core
        self._names = pynvml
        self._num_users = 0

    def _error(self, name: str) -> Exception:
        return self._names.NVMLError(getattr(self._names, f"NVML_ERROR_{name}"))

    def _facts(self, *keys: object) -> dict[str, Any]:
        if self._num_users == 0:
            raise self._error("UNINITIALIZED")
        found = json.loads(os.environ.get("SIMULATED_NVML") or "{}")
        for key in keys:
            found = found.get(str(key), {})
        if found.get("lost"):
            raise self._error("GPU_IS_LOST")
        return found

    def unsupported(self, *args: Any) -> Any:
        """Report that the driver does not support a query."""
        self._facts()
        raise self._error("NOT_SUPPORTED")

    def nvmlInit(self) -> None:
        if not is_installed():
            raise self._error("LIBRARY_NOT_FOUND")
        self._num_users += 1

    def nvmlShutdown(self) -> None:
        self._facts()
        self._num_users -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self._facts().get("driver", "580.65.06")

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self._facts().get("cuda", 13000)

    def nvmlDeviceGetCount(self) -> int:
        self._facts()
        return int(os.environ["SIMULATED_GPUS"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self._facts(index)
        if not 0 <= index < self.nvmlDeviceGetCount():
            raise self._error("INVALID_ARGUMENT")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        self._facts(handle)
        return self._core.uuid_of(handle)

    def nvmlDeviceGetName(self, handle: int) -> str:
        self._facts(handle)
        return "Simulated GPU"

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        self._facts(handle)
        return SimpleNamespace(busId=f"00000000:{handle + 1:02X}:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        total = self._core.most_bytes()
        free = self._facts(handle).get("free", total)
        return SimpleNamespace(total=total, free=free, used=total - free)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        number = self._facts(handle).get("processes", 0)
        return [SimpleNamespace(pid=1 + index, usedGpuMemory=None) for index in range(number)]

    def nvmlDeviceGetPersistenceMode(self, handle: int) -> int:
        self._facts(handle)
        return self._names.NVML_FEATURE_ENABLED

    def nvmlDeviceGetEccMode(self, handle: int) -> list[int]:
        self._facts(handle)
        return [self._names.NVML_FEATURE_ENABLED] * 2

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return self._facts(handle).get("uncorrected", 0)

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> list[SimpleNamespace]:
        action = self._facts(handle).get("action", 0)
        return [SimpleNamespace(nvmlReturn=self._names.NVML_SUCCESS, value=SimpleNamespace(uiVal=action))]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return self._facts(handle).get("slowed", 0)

    def nvmlDeviceGetComputeMode(self, handle: int) -> int:
        return self._facts(handle).get("mode", self._names.NVML_COMPUTEMODE_DEFAULT)

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        self._facts(handle)
        if link >= TOTAL_LINKS:
            raise self._error("INVALID_ARGUMENT")
        return self._names.NVML_FEATURE_ENABLED

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        self._facts(handle)
        return self._names.NVML_NVLINK_DEVICE_TYPE_SWITCH

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, kind: int) -> int:
        self._facts(one)
        return self._names.NVML_P2P_STATUS_OK

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        self._facts(one)
        return self._names.NVML_TOPOLOGY_SYSTEM
