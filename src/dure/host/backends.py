"""Communication backends: which one a run uses, and what each can reach.

torch names the backend of a kind of device (`nccl` for CUDA, `xccl` for XPU), and for each backend the kinds whose
tensors it takes; packages from outside register theirs.
"""

import sys
from collections.abc import Sequence

from dure.host.device_kinds import HOST, device_kind

OVER_SOCKETS = "gloo"
OVER_MEMORY = "dure_shm"
_SENDS_NOTHING = "fake"
"""Backend of torch's own tests. Once imported it is the one of every kind for which there is no other."""


def device_backend(kind: str) -> str | None:
    """Return the backend that moves tensors between devices of a kind; None if there is none here."""
    import torch.distributed as dist

    if kind == HOST or not dist.is_available():
        return None
    try:
        name = str(dist.get_default_backend_for_device(kind))
    except (ValueError, RuntimeError):  # torch names none, or does not know this kind
        return None
    return name if name != OVER_SOCKETS and reaches(name, kind) else None


def reaches(backend: str, kind: str) -> bool:
    """Return whether collectives of a backend take tensors of a kind of device.

    Args:
        backend: torch's name of a backend, or of one for each kind of device, as `cpu:gloo,cuda:nccl`.
        kind: Kind of device.
    """
    return kind in _capability(_backend_for(backend, kind))


def sends_between_devices(backend: str, kind: str) -> bool:
    """Return whether messages from rank to rank may be of devices' tensors; for the arguments, see `reaches`.

    gloo's collectives take tensors of CUDA devices, but in messages it would read their addresses as the host's.
    """
    return kind != HOST and reaches(backend, kind) and _backend_for(backend, kind) != OVER_SOCKETS


def takes_devices_only(backend: str) -> bool:
    """Return whether a backend, by torch's name, takes no tensors of the host."""
    return bool(_capability(backend)) and not reaches(backend, HOST)


def _backend_for(backend: str, kind: str) -> str:
    """Return the backend for a kind of device among those of a group; one that is named alone is for all kinds."""
    names = dict(part.rpartition(":")[::2] for part in backend.split(","))
    return names.get(kind, names.get("", ""))


def _capability(backend: str) -> Sequence[str]:
    import torch.distributed as dist

    if backend == OVER_MEMORY:
        return (HOST,)
    return () if backend == _SENDS_NOTHING else dist.Backend.backend_capability.get(backend, ())


def is_available(backend: str) -> bool:
    """Return whether this torch brings a backend, by torch's name."""
    import torch.distributed as dist

    return OVER_MEMORY in backend or bool(dist.is_backend_available(backend))


def backend_cure(kind: str) -> str:
    """Return how ranks get a backend that moves tensors between devices of a kind."""
    own = device_backend(kind)
    return "no --share-devices" + (f", --backend auto or {own}" if own else "; torch has no backend for them here")


def backend_name(chosen: str, kind: str, *, is_one_host: bool, sends_from_devices: bool) -> str:
    """Return torch's name of the backend of a run.

    Args:
        chosen: Backend as in the settings; `auto` for shared memory if several ranks of one host compute on its CPU.
        kind: Kind of the devices.
        is_one_host: Whether there are several ranks, all on one host.
        sends_from_devices: Whether all ranks exchange tensors of their own devices, if a backend takes them.
    """
    if chosen == "auto":
        shared = OVER_MEMORY if kind == HOST and is_one_host and sys.platform == "linux" else OVER_SOCKETS
        chosen = (device_backend(kind) if sends_from_devices else None) or shared
    return f"{HOST}:{OVER_MEMORY}" if chosen == OVER_MEMORY else chosen


def known_backends() -> list[str]:
    """Return the names that a setting may have: dure's own words, and the backends that torch has tensors for."""
    import torch.distributed as dist

    others = [one for one in dist.Backend.backend_capability if one not in (OVER_SOCKETS, _SENDS_NOTHING)]
    return ["auto", OVER_SOCKETS, OVER_MEMORY, *others]


def fault_of_backend(chosen: str, kind: str) -> str | None:
    """Return a sentence if a chosen backend is unknown, or cannot reach the devices of a run; otherwise None."""

    if chosen in ("auto", OVER_SOCKETS) or (chosen == OVER_MEMORY and kind == HOST):
        return None  # over gloo goes what is copied to the host
    own = device_backend(kind)
    usable = [*([own] if own else []), *([OVER_SOCKETS] if own is None or reaches(OVER_SOCKETS, kind) else [])]
    cure = f"use {' or '.join(usable)}"
    if chosen == OVER_MEMORY:
        return f"backend is {chosen}, which moves CPU tensors only, but device is {kind}: {cure}"
    reached = _capability(chosen)
    if not reached:
        known = ["auto", OVER_SOCKETS, OVER_MEMORY, *([own] if own else [])]
        return f"unknown backend {chosen!r}: known here: {', '.join(known)}"
    if kind not in reached:
        titles = " and ".join(device_kind(one).title for one in reached)
        return f"backend is {chosen}, which moves {titles} tensors only, but device is {kind}: {cure}"
    if not is_available(chosen):
        instead = f"use {OVER_SOCKETS}" if reaches(OVER_SOCKETS, kind) else "use --device cpu"
        return f"backend is {chosen}, but this torch is built without it: install one that has it, or {instead}"
    return None
