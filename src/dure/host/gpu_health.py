"""Health of a GPU on which something failed, read through NVIDIA's management library (NVML).

A driver may not answer at all about a GPU that is lost: it is asked in a thread, for a limited time. No CUDA context is
made.
"""

import importlib
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

LIMIT_SECONDS = 1.0
"""Longest wait for the driver's answer, in seconds. A healthy driver answers in some hundredths; the other ranks wait
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
"""Recovery action in words that follow the GPU's name, and True if the GPU computes nothing until then; by value of
`nvmlDeviceGpuRecoveryAction_t`."""


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """Driver's report on one GPU."""

    has_answered: bool = False
    """True if the driver is there, and knows which GPU is meant."""
    smi_id: str | None = None
    """Argument of `nvidia-smi -i`: the GPU's address, or its number if it is lost."""
    is_lost: bool = False
    """True if the GPU is gone, or computes nothing before a reset."""
    troubles: tuple[str, ...] = ()
    """Problems of the GPU, each in words that follow its name."""


def gpu_health(
    index: int, library: Any = None, visible: str | None = None, limit_seconds: float = LIMIT_SECONDS
) -> GpuHealth:
    """Ask the driver whether a GPU is lost, must be reset, or has had errors of its memory.

    Args:
        index: As CUDA counts it in this process.
        library: An object with pynvml's names; None: pynvml.
        visible: `CUDA_VISIBLE_DEVICES`; None: the environment's.
        limit_seconds: Longest time to wait for the answer.
    """
    answers: list[GpuHealth] = []

    def ask() -> None:
        with suppress(Exception):  # whatever it is, it must not hide the failure that is being explained
            nvml = importlib.import_module("pynvml") if library is None else library
            answers.append(_asked(nvml, index, os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible))

    thread = threading.Thread(target=ask, name="dure-gpu-health", daemon=True)
    thread.start()
    thread.join(limit_seconds)
    if answers:
        return answers[0]
    if thread.is_alive():
        return GpuHealth(troubles=(f"may be lost, for its driver has said nothing about it for {limit_seconds:g} s",))
    return GpuHealth()


def visible_gpus(library: Any = None, visible: str | None = None) -> list[str]:
    """Return the names (UUIDs) of the GPUs, or parts of GPUs, that a process sees; none where the driver cannot tell.

    Args:
        library: An object with pynvml's names; None: pynvml.
        visible: `CUDA_VISIBLE_DEVICES`; None: the environment's.
    """
    nvml = importlib.import_module("pynvml") if library is None else library
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if visible is None else visible
    words = [] if visible is None else [word.strip() for word in visible.split(",")]
    if words and all(word.startswith("MIG-") for word in words):
        return words
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        uuids = [_uuid(nvml, _handle(nvml, position)) for position in range(nvml.nvmlDeviceGetCount())]
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
    handles = [_handle(nvml, position) for position in range(count)]
    uuids = [_uuid(nvml, handle) for handle in handles]
    positions = visible_positions(visible, uuids)
    if index >= len(positions):
        is_named_by_number = visible is None or all(word.strip().isdecimal() for word in visible.split(","))
        if None in handles:  # its name went with it
            return _lost("is probably the one that is lost")
        if not is_named_by_number:
            return GpuHealth()  # a part of a GPU (MIG), for one
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


def _handle(nvml: Any, position: int) -> Any:
    """Return what the driver knows a GPU by; None of one that is lost."""
    try:
        return nvml.nvmlDeviceGetHandleByIndex(position)
    except nvml.NVMLError:
        # "GPU is lost", and "Unknown Error" where the driver was opened again after that
        return None


def _uuid(nvml: Any, handle: Any) -> str:
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
    """Return the memory errors since the driver was loaded that ECC could not mend; None: it does not count them.

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
    """Return what the driver wants to be done before the GPU is well again, 0 for nothing; None: it does not say.

    Raises:
        NVMLError: The GPU is lost.
    """
    try:
        (field,) = nvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_FIELD])
    except nvml.NVMLError as error:
        _raise_if_lost(nvml, error)
        return None
    return int(field.value.uiVal) if field.nvmlReturn == nvml.NVML_SUCCESS else None


def _raise_if_lost(nvml: Any, error: Any) -> None:
    if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED, nvml.NVML_ERROR_UNINITIALIZED):
        raise error


def visible_positions(visible: str | None, uuids: Sequence[str]) -> list[int]:
    """Return which GPUs a process sees, and in which order, as CUDA reads `CUDA_VISIBLE_DEVICES`.

    CUDA counts by speed and NVML by bus; where all GPUs are of a kind that is the same. What stands after a number that
    is none, or a name that is not there, is not seen.
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
    """Return a text of NVML's, which older versions of pynvml give as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
