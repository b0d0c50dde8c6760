"""A stand-in for pynvml on a machine that has GPUs: its names, constants, structures and errors are the real ones."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pynvml


@dataclass
class Card:
    """A GPU, as its driver would tell of it."""

    bus: int
    name: str = "NVIDIA H100 80GB HBM3"
    free: float = 1.0
    processes: int = 0
    busy: float = 0.5
    pcie: tuple[int, int, int, int] = (5, 5, 16, 16)
    """Generation now and at most, width now and at most."""
    links: list[Any] = field(default_factory=list)
    """Each the bus of the GPU at its other end, `switch`, or None where it is down."""
    link_version: int = pynvml.NVML_NVLINK_VERSION_4_0
    persistent: bool = True
    uncorrected: int = 0
    events: int = 0
    compute_mode: int = pynvml.NVML_COMPUTEMODE_DEFAULT
    mig: int = 0
    peers: int = pynvml.NVML_P2P_STATUS_OK
    recovery: int = 0
    is_lost: bool = False
    has_handle: bool = True
    """True if the library was open before the card was lost, and still knows it by name."""

    @property
    def bus_id(self) -> str:
        return f"00000000:{self.bus:02X}:00.0"


TOTAL = 80 * 2**30


class Nvml:
    """Functions of pynvml that dure calls. Any other raises `Not Supported`, as under an older driver."""

    def __init__(self, *cards: Card, why_not: int | None = None) -> None:
        self.cards, self.why_not, self.is_open = cards, why_not, False

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)
        if not name.startswith("nvml") or not callable(real) or isinstance(real, type):
            return real

        def missing(*_: Any) -> None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)

        return missing

    def __dir__(self) -> list[str]:
        return dir(pynvml)

    def nvmlInit(self) -> None:
        if self.why_not is not None:
            raise pynvml.NVMLError(self.why_not)
        self.is_open = True

    def nvmlShutdown(self) -> None:
        assert self.is_open
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        card = self.cards[index]
        if card.is_lost and not card.has_handle:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return card

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.15"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12080

    def nvmlDeviceGetUUID(self, card: Card) -> str:
        return f"GPU-{card.bus:08x}-0000"

    def nvmlDeviceGetName(self, card: Card) -> str:
        return card.name

    def nvmlDeviceGetPciInfo(self, card: Card) -> Any:
        if card.is_lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        info = pynvml.nvmlPciInfo_t()
        info.busId = card.bus_id.encode()
        return info

    def nvmlDeviceGetFieldValues(self, card: Card, fields: list[int]) -> Any:
        assert fields == [pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        values = (pynvml.c_nvmlFieldValue_t * 1)()
        values[0].value.uiVal = card.recovery
        return values

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Any:
        return pynvml.c_nvmlMemory_t(TOTAL, int(TOTAL * card.free), int(TOTAL * (1 - card.free)))

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> Any:
        return pynvml.c_nvmlUtilization_t(int(100 * card.busy), 10)

    def nvmlDeviceGetPowerUsage(self, card: Card) -> int:
        return 350_500

    def nvmlDeviceGetEnforcedPowerLimit(self, card: Card) -> int:
        return 700_000

    def nvmlDeviceGetClockInfo(self, card: Card, kind: int) -> int:
        assert kind == pynvml.NVML_CLOCK_SM
        return 1200

    def nvmlDeviceGetMaxClockInfo(self, card: Card, kind: int) -> int:
        return 1980

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> list[object]:
        return [object()] * card.processes

    def nvmlDeviceGetPersistenceMode(self, card: Card) -> int:
        return int(card.persistent)

    def nvmlDeviceGetEccMode(self, card: Card) -> list[int]:
        return [1, 1]

    def nvmlDeviceGetTotalEccErrors(self, card: Card, kind: int, counter: int) -> int:
        assert (kind, counter) == (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        return card.uncorrected

    def nvmlDeviceGetMigMode(self, card: Card) -> list[int]:
        return [card.mig, card.mig]

    def nvmlDeviceGetComputeMode(self, card: Card) -> int:
        return card.compute_mode

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: Card) -> int:
        return card.events  # this driver does not know the newer name

    def nvmlDeviceGetCurrPcieLinkGeneration(self, card: Card) -> int:
        return card.pcie[0]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, card: Card) -> int:
        return card.pcie[1]

    def nvmlDeviceGetCurrPcieLinkWidth(self, card: Card) -> int:
        return card.pcie[2]

    def nvmlDeviceGetMaxPcieLinkWidth(self, card: Card) -> int:
        return card.pcie[3]

    def nvmlDeviceGetNvLinkState(self, card: Card, link: int) -> int:
        if not card.links:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if link >= len(card.links):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(card.links[link] is not None)

    def nvmlDeviceGetNvLinkVersion(self, card: Card, link: int) -> int:
        return card.link_version

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, card: Card, link: int) -> int:
        is_switch = card.links[link] == "switch"
        return pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if is_switch else pynvml.NVML_NVLINK_DEVICE_TYPE_GPU

    def nvmlDeviceGetNvLinkRemotePciInfo(self, card: Card, link: int) -> Any:
        info = pynvml.nvmlPciInfo_t()
        info.busId = Card(card.links[link]).bus_id.encode()
        return info

    def nvmlDeviceGetP2PStatus(self, one: Card, other: Card, index: int) -> int:
        ctypes.c_uint(index)  # a tuple, as one of pynvml's constants is, would be refused here too
        return max(one.peers, other.peers)

    def nvmlDeviceGetTopologyCommonAncestor(self, one: Card, other: Card) -> int:
        return pynvml.NVML_TOPOLOGY_SINGLE if one.bus // 16 == other.bus // 16 else pynvml.NVML_TOPOLOGY_SYSTEM


@contextmanager
def installed(library: Nvml, visible: str | None = None) -> Iterator[None]:
    """Let dure find this library, and these GPUs visible; None for all of them."""
    with mock.patch.dict(sys.modules, {"pynvml": library}), mock.patch.dict(os.environ):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        os.environ |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        yield
