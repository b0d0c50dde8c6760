"""Kinds of devices, and what each can do: the only module that knows one by its name.

A kind is a type of `torch.accelerator`: `cuda` (NVIDIA, and AMD by ROCm), `mps`, `xpu`, `hpu`, `mtia`, or the name that
a package from outside has given to PrivateUse1. Other modules ask for an ability. What torch's generic interfaces tell
is asked of torch; `KINDS` has the rest. What is unknown of a kind (None there) is tried once, on a rank's own device.
"""

import functools
import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any

from dure.host.environment import variables

HOST = "cpu"
_CHECK_WITHOUT_RUNTIME = "PYTORCH_NVML_BASED_CUDA_CHECK"


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """Abilities of a kind of device."""

    title: str
    """Name in sentences."""
    has_several: bool = True
    """True if a host may have several, which a process selects by index."""
    copies_beside: bool | None = None
    """True if a device copies from and to pinned host memory, on a stream of its own, while it computes."""
    has_timed_events: bool | None = None
    """True if events in a device's stream measure time."""
    has_blocking_events: bool = False
    """True if a thread that waits for an event of the kind's own module may leave its core to others."""
    has_float64: bool | None = None
    """True if a device computes in float64."""
    counts_without_runtime: bool = False
    """True if torch counts the devices without starting their runtime, which a forked process could then not use."""
    pins_any_memory: bool = False
    """True if torch can pin host memory that it did not allocate."""
    has_nvml: bool = False
    """True if NVML reports on the devices."""
    times_convolutions: bool = False
    """True if each start may choose the algorithms of convolutions by timing (cuDNN's benchmark)."""
    has_tf32: bool = False
    """True if it can multiply float32 matrices in fewer bits."""
    has_address: bool = False
    """True if the system tells which cores are near a device."""
    has_sync_batchnorm: bool = False
    """True if torch's own SyncBatchNorm has kernels for it."""
    compiles: bool | None = None
    """True if `torch.compile` generates code for it."""
    visible: str | None = None
    """Environment variable that selects devices of a host."""


KINDS = {
    HOST: DeviceKind(
        title="CPU",
        has_several=False,
        copies_beside=False,
        has_timed_events=False,
        has_float64=True,
        counts_without_runtime=True,
        compiles=True,
    ),
    "cuda": DeviceKind(
        title="CUDA",
        copies_beside=True,
        has_timed_events=True,
        has_blocking_events=True,
        has_float64=True,
        counts_without_runtime=True,
        pins_any_memory=True,
        has_nvml=True,
        times_convolutions=True,
        has_tf32=True,
        has_address=True,
        has_sync_batchnorm=True,
        compiles=True,
        visible="CUDA_VISIBLE_DEVICES",
    ),
    "mps": DeviceKind(
        title="MPS",
        has_several=False,
        copies_beside=False,
        has_timed_events=True,
        has_float64=False,
        counts_without_runtime=True,
        compiles=True,
    ),
    "xpu": DeviceKind(title="XPU", compiles=True, visible="ZE_AFFINITY_MASK"),
    "hpu": DeviceKind(title="HPU", visible="HABANA_VISIBLE_MODULES"),
    "mtia": DeviceKind(title="MTIA"),
}
"""Kinds that torch has names for."""


def device_kind(name: str) -> DeviceKind:
    """Return the abilities of a kind; of one from outside, those that have to be tried are None."""
    return KINDS.get(name) or DeviceKind(title=name)


def known_kinds() -> tuple[str, ...]:
    """Return the names of all kinds that this torch may be asked for, the CPU first."""
    import torch

    here = torch.accelerator.current_accelerator()
    return tuple(dict.fromkeys([*KINDS, *([] if here is None else [here.type])]))


# --- abilities that a rank tries on its own device


def copies_beside(name: str) -> bool:
    """Return whether devices copy from and to pinned memory while they compute."""
    known = device_kind(name).copies_beside
    return _can(name, _copy_beside) if known is None else known


def has_timed_events(name: str) -> bool:
    """Return whether events of a device measure time."""
    known = device_kind(name).has_timed_events
    return _can(name, _time_event) if known is None else known


def is_capturing(name: str) -> bool:
    """Return whether the calls of a device are being recorded as a graph, in which no event may be waited for."""
    import torch

    is_in_graph = getattr(torch.get_device_module(name), "is_current_stream_capturing", None)
    return bool(is_in_graph is not None and is_in_graph())


def waited_event(device: Any, *, enable_timing: bool = False) -> Any:
    """Return an event of a device, for which a thread will wait.

    A wait for a `torch.Event` may take a whole core, which ranks and their loaders compete for: its `blocking` has no
    effect (torch 2.14).

    Args:
        device: A `torch.device`.
        enable_timing: Whether the event measures time.
    """
    import torch

    if device_kind(device.type).has_blocking_events:
        return _module(device.type).Event(enable_timing=enable_timing, blocking=True)
    return torch.Event(device=device, enable_timing=enable_timing)


def has_float64(name: str) -> bool:
    """Return whether devices compute in float64."""
    known = device_kind(name).has_float64
    return _can(name, _compute_in_float64) if known is None else known


@functools.cache
def _can(name: str, attempt: Callable[[str], object]) -> bool:
    try:
        attempt(name)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        return False
    return True


def _copy_beside(name: str) -> None:
    import torch

    pinned = torch.empty(1, pin_memory=True)
    stream = torch.Stream(torch.device(name))
    with stream:
        there = pinned.to(name, non_blocking=True)
    there.record_stream(torch.accelerator.current_stream())
    stream.record_event().synchronize()


def _time_event(name: str) -> None:
    import torch

    marks = [torch.Event(device=name, enable_timing=True) for _ in range(2)]
    for mark in marks:
        mark.record()
    marks[1].synchronize()
    marks[0].elapsed_time(marks[1])


def _compute_in_float64(name: str) -> None:
    import torch

    torch.ones(1, dtype=torch.float64, device=name).sum().item()


def can_compile(name: str) -> bool:
    """Return whether `torch.compile` generates code for devices of a kind."""
    from dure.torchcompat.devices import has_inductor_for

    known = device_kind(name).compiles
    return has_inductor_for(name) if known is None else known


def autocast_dtypes(name: str) -> Collection[Any] | None:
    """Return the dtypes of autocast that the module of a kind from outside names; None for a kind that torch knows."""
    if name in KINDS:
        return None
    find_dtypes = getattr(_module(name), "get_amp_supported_dtype", None)
    return () if find_dtypes is None else tuple(find_dtypes())


# --- counts, and what a fork may leave behind


def runtimes_left_alone() -> AbstractContextManager[None]:
    """Return a context in which `torch.cuda.is_available()` starts no CUDA, which would not survive a fork."""
    return variables({_CHECK_WITHOUT_RUNTIME: "1"})


def count_of_torch(name: str) -> int:
    """Return torch's count of the visible devices of its accelerator, which is of this kind.

    This process may be forked into ranks later. Where counting would start the runtime, a forked child counts.
    """
    import torch

    if device_kind(name).counts_without_runtime or _is_started(name) or not hasattr(os, "fork"):
        return torch.accelerator.device_count()
    counted = _count_in_child(name, os.environ.get(device_kind(name).visible or ""))
    return torch.accelerator.device_count() if counted is None else counted


@functools.cache
def _count_in_child(name: str, visible: str | None) -> int | None:
    """Count in a forked child; None if it has lost the devices of this process, which has then started the runtime.

    The result is kept: forked ranks inherit it.
    """
    import torch

    if _is_lost_in_child(name):
        return None
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        count = 0
        with suppress(BaseException):
            count = torch.accelerator.device_count()
        os.write(write, str(count).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="ascii") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return int(text or 0)


def reason_fork_would_lose_devices() -> str | None:
    """Return the reason why a forked child of this process could not use its devices, or None."""
    import torch

    here = torch.accelerator.current_accelerator()
    if here is None:
        return None
    name, title = here.type, device_kind(here.type).title
    if _is_started(name):
        return f"{title} is in use in this process"
    if (not device_kind(name).counts_without_runtime or count_of_torch(name)) and _is_lost_in_child(name):
        asked = f"torch.{name}.is_available() is enough"
        return f"{title} was asked for in this process ({asked})"
    return None


def _is_started(name: str) -> bool:
    """Return whether this process uses devices; a module from outside may not tell."""
    return bool(getattr(_module(name), "is_initialized", bool)())


def _is_lost_in_child(name: str) -> bool:
    """Return whether torch would refuse the devices in a forked process, which only a forked child can find out."""
    is_refused = getattr(_module(name), "_is_in_bad_fork", None)
    if is_refused is None:
        return False
    pid = os.fork()
    if pid == 0:
        os._exit(int(is_refused()))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def _module(name: str) -> Any:
    import torch

    return torch.get_device_module(name)


# --- facts about devices


def memory_of(device: Any) -> tuple[int, int] | None:
    """Return the free and total bytes of a device's memory; None for the CPU, and if the kind does not tell."""
    import torch

    if not device_kind(device.type).has_several:
        return None
    with suppress(RuntimeError, NotImplementedError):
        free, total = torch.accelerator.get_memory_info(device)
        return int(free), int(total)
    return None


def peak_memory_of(device: Any) -> int | None:
    """Return the most bytes that torch has reserved on a device in this process; None if the kind does not tell."""
    read = getattr(_module(device.type), "max_memory_reserved", None)
    with suppress(RuntimeError, NotImplementedError):
        return None if read is None else int(read(device))
    return None


def name_of_device(kind: str) -> str:
    """Return the product name of the first device of a kind, or the kind if it has none."""
    name = getattr(_module(kind), "get_device_name", None) if kind != HOST else None
    return str(name(0)) if name is not None else kind


def current_index() -> int | None:
    """Return the index of the device that torch uses in this thread; None before it uses one, which must not start now.

    Raises:
        RuntimeError: The device is broken, and every call says so.
    """
    import torch

    here = torch.accelerator.current_accelerator()
    if here is None or not _is_started(here.type):
        return None
    return torch.accelerator.current_device_index()


def versions() -> dict[str, str | None]:
    """Return the versions of CUDA (or ROCm) and NCCL that this torch brings; None for what it lacks."""
    import torch
    import torch.distributed as dist

    has_nccl = bool(torch.version.cuda or torch.version.hip) and dist.is_nccl_available()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None
    return {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "NCCL": nccl}
