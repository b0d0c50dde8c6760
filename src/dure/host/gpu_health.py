"""Health of a GPU after a failure, read through NVIDIA's management library (NVML).

A driver may never return from a query about a lost GPU, so it is queried in a thread, for a limited time. No CUDA
context is created.
"""

import importlib
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

LIMIT_SECONDS = 1.0
"""Maximum seconds to wait for the driver. A healthy driver returns within hundredths; the other ranks wait
meanwhile."""

_RECOVERY_FIELD = 230
"""Value of `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`, which pynvml names since 12.570."""
RECOVERIES = {
    1: ("must be reset", True),
    2: ("comes back only when its host is rebooted", True),
    3: ("must be rid of all that use its links to other GPUs", False),
    4: ("should be reset when nobody uses it", False),
    6: ("must be reset together with its bus", True),
    7: ("comes back only when its host is rebooted", True),
}
"""Recovery action as words that follow the GPU's name, and True if the GPU computes nothing until then; by value of
`nvmlDeviceGpuRecoveryAction_t`."""

_SLOWDOWNS = "HW slowdown", "HW thermal slowdown", "HW power brake", "SW thermal slowdown"


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """Driver's report on one GPU."""

    has_answered: bool = False
    """True if the driver is available and knows the GPU."""
    smi_id: str | None = None
    """Argument of `nvidia-smi -i`: the GPU's address, or its number if it is lost."""
    is_lost: bool = False
    """True if the GPU is lost, or computes nothing before a reset."""
    troubles: tuple[str, ...] = ()
    """Problems of the GPU, each as words that follow its name."""


def gpu_health(index: int, limit_seconds: float = LIMIT_SECONDS) -> GpuHealth:
    """Query the driver whether a GPU is lost, must be reset, or has had memory errors.

    Args:
        index: CUDA index of the GPU in this process.
        limit_seconds: Maximum seconds to wait for the driver.
    """
    answers: list[GpuHealth] = []

    def ask() -> None:
        with suppress(Exception):  # no error here may hide the failure that is being explained
            answers.append(_asked(importlib.import_module("pynvml"), index, os.environ.get("CUDA_VISIBLE_DEVICES")))

    thread = threading.Thread(target=ask, name="dure-gpu-health", daemon=True)
    thread.start()
    thread.join(limit_seconds)
    if answers:
        return answers[0]
    if thread.is_alive():
        return GpuHealth(troubles=(f"may be lost, for its driver has said nothing about it for {limit_seconds:g} s",))
    return GpuHealth()


def visible_gpus() -> list[str]:
    """Return the UUIDs of the GPUs, or parts of GPUs, that this process sees; empty if the driver reports none."""
    nvml, visible = importlib.import_module("pynvml"), os.environ.get("CUDA_VISIBLE_DEVICES")
    words = [] if visible is None else [word.strip() for word in visible.split(",")]
    if words and all(word.startswith("MIG-") for word in words):
        return words
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        uuids = [uuid_of(nvml, handle_at(nvml, position)) for position in range(nvml.nvmlDeviceGetCount())]
        return [uuids[position] for position in visible_positions(visible, uuids)]
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()


def _asked(nvml: Any, index: int, visible: str | None) -> GpuHealth:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            return GpuHealth()
        return GpuHealth(troubles=(f"cannot be looked at: {error}",))
    try:
        return _health(nvml, index, visible)
    finally:
        nvml.nvmlShutdown()


def _health(nvml: Any, index: int, visible: str | None) -> GpuHealth:
    count = nvml.nvmlDeviceGetCount()
    handles = [handle_at(nvml, position) for position in range(count)]
    uuids = [uuid_of(nvml, handle) for handle in handles]
    positions = visible_positions(visible, uuids)
    if index >= len(positions):
        is_named_by_number = visible is None or all(word.strip().isdecimal() for word in visible.split(","))
        if None in handles:  # its UUID is lost as well
            return _lost("is probably the one that is lost")
        if not is_named_by_number:
            return GpuHealth()  # for example a part of a GPU (MIG)
        return _lost(f"is not among the {count} that are left")
    handle = handles[positions[index]]
    number = str(positions[index])
    if handle is None:
        return _lost("is lost and no longer answers on its bus", number)
    try:
        return _health_of(nvml, handle)
    except nvml.NVMLError as error:
        if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
            return _lost("is lost and no longer answers on its bus", number)
        if error.value == nvml.NVML_ERROR_RESET_REQUIRED:
            return _lost("must be reset", number)
        return GpuHealth(troubles=(f"cannot be looked at: {error}",))


def _lost(how: str, smi_id: str | None = None) -> GpuHealth:
    return GpuHealth(has_answered=True, smi_id=smi_id, is_lost=True, troubles=(how,))


def handle_at(nvml: Any, position: int) -> Any:
    """Return the driver's handle of a GPU; None if the GPU is lost."""
    try:
        return nvml.nvmlDeviceGetHandleByIndex(position)
    except nvml.NVMLError:
        # "GPU is lost", or "Unknown Error" if the driver was opened again after that
        return None


def uuid_of(nvml: Any, handle: Any) -> str:
    """Return the driver's name of a GPU; empty if the GPU is lost."""
    try:
        return "" if handle is None else text(nvml.nvmlDeviceGetUUID(handle))
    except nvml.NVMLError:
        return ""


def _health_of(nvml: Any, handle: Any) -> GpuHealth:
    smi_id = text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()
    number = uncorrected_errors(nvml, handle)
    action = recovery_action(nvml, handle)
    recovery, is_lost = RECOVERIES.get(action or 0, (None, False))
    errors = f"has had {number} memory error(s) that ECC could not mend" if number else None
    troubles = tuple(words for words in (errors, recovery) if words is not None)
    return GpuHealth(has_answered=True, smi_id=smi_id, is_lost=is_lost, troubles=troubles)


def uncorrected_errors(nvml: Any, handle: Any) -> int | None:
    """Return the memory errors since the driver was loaded that ECC could not correct; None if they are not counted.

    Raises:
        NVMLError: The GPU is lost.
    """
    kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    try:
        return int(nvml.nvmlDeviceGetTotalEccErrors(handle, *kind))
    except nvml.NVMLError as error:
        _raise_if_lost(nvml, error)
        return None


def recovery_action(nvml: Any, handle: Any) -> int | None:
    """Return the action that the driver requests to recover the GPU, 0 for none; None if it is not reported.

    Raises:
        NVMLError: The GPU is lost.
    """
    try:
        (field,) = nvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_FIELD])
    except nvml.NVMLError as error:
        _raise_if_lost(nvml, error)
        return None
    return int(field.value.uiVal) if field.nvmlReturn == nvml.NVML_SUCCESS else None


def slowdowns(nvml: Any, handle: Any) -> tuple[str, ...]:
    """Return the reasons why the hardware slows a GPU down now; none if the driver does not report them.

    Raises:
        NVMLError: The GPU is lost.
    """
    reasons = 0
    # drivers before 535 have only the older name
    for question in (nvml.nvmlDeviceGetCurrentClocksEventReasons, nvml.nvmlDeviceGetCurrentClocksThrottleReasons):
        try:
            reasons = question(handle)
            break
        except nvml.NVMLError as error:
            _raise_if_lost(nvml, error)
    bits = (
        nvml.nvmlClocksEventReasonHwSlowdown,
        nvml.nvmlClocksEventReasonHwThermalSlowdown,
        nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
        nvml.nvmlClocksEventReasonSwThermalSlowdown,
    )
    return tuple(word for bit, word in zip(bits, _SLOWDOWNS, strict=True) if reasons & bit)


def _raise_if_lost(nvml: Any, error: Any) -> None:
    if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED, nvml.NVML_ERROR_UNINITIALIZED):
        raise error


def visible_positions(visible: str | None, uuids: Sequence[str]) -> list[int]:
    """Return the GPUs that a process sees, in order, by CUDA's rules for `CUDA_VISIBLE_DEVICES`.

    CUDA orders GPUs by speed and NVML by bus, which is the same if all are of one type. Entries after an invalid number
    or an unknown name are not visible.
    """
    if visible is None:
        return list(range(len(uuids)))
    positions: list[int] = []
    for word in (word.strip() for word in visible.split(",")):
        if word.isdecimal():
            found = [int(word)] if int(word) < len(uuids) else []
        else:
            found = [place for place, uuid in enumerate(uuids) if word and uuid.lower().startswith(word.lower())]
        if len(found) != 1 or found[0] in positions:
            break
        positions += found
    return positions


def text(value: Any) -> str:
    """Return a text from NVML, which older versions of pynvml return as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
