"""Submission of collectives, and the handles by which scripts wait for them."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dure.compat.horovod.common import basics
from dure.compat.horovod.common.process_sets import ProcessSet
from dure.compat.horovod.engine.entries import Entry
from dure.compat.horovod.engine.failures import HorovodInternalError
from dure.compat.horovod.engine.requests import BYTES, GLOBAL_SET, Request

_NAMES = {getattr(torch, name): name for name in BYTES}
_REDUCED = frozenset(name for name in BYTES if name not in ("bool", "complex64", "complex128"))

_lock = threading.Lock()
_num_handles = 0
_num_unnamed: dict[tuple[int, bool], int] = {}
"""Calls without a name, for each process set, barriers apart: their numbers are the names."""
_num_joins = 0
_AFTER_JOIN = 1_000_000
"""Distance of the numbers after a join, before which ranks have made different numbers of calls."""
_entries: dict[int, tuple[Entry, Callable[[Entry], Any]]] = {}
"""Collectives that no one has waited for, with the function that returns their results."""


def _reset() -> None:
    global _num_handles, _num_joins
    with _lock:
        _num_handles = _num_joins = 0
        _num_unnamed.clear()
        _entries.clear()


def note_join() -> None:
    """Number the calls without a name from a number on which all ranks agree again."""
    global _num_joins
    with _lock:
        _num_joins += 1
        _num_unnamed[GLOBAL_SET, False] = _AFTER_JOIN * _num_joins


def _unnamed(kind: str, process_set: int) -> str:
    key = process_set, kind == "barrier"
    number = _num_unnamed.get(key, 0)
    _num_unnamed[key] = number + 1
    return f"noname.{number}"


basics.on_init.append(_reset)


def submit(
    kind: str,
    tensors: Sequence[Tensor],
    results: Callable[[Entry], Any],
    *,
    name: str | None,
    process_set: ProcessSet,
    prefix: str | None = None,
    is_in_place: bool = False,
    **settings: Any,
) -> int:
    """Ask for a collective; return its handle.

    Args:
        kind: Kind of the collective.
        tensors: Its tensors.
        results: Returns what `synchronize` returns.
        name: Name by which ranks are matched; None for one from the number of the call.
        process_set: Ranks that take part.
        prefix: First part of the name; the kind by default.
        is_in_place: Whether results overwrite the tensors.
        settings: Further fields of the request.

    Raises:
        ValueError: A tensor cannot be sent, this rank is not in the set, or the name is in use.
        HorovodInternalError: Horovod has been shut down.
    """
    global _num_handles
    engine = basics.engine()
    number = process_set.process_set_id
    members = None if number is None else engine.members_of(number)
    if number is None or members is None:
        raise ValueError(f"{kind}: {process_set} does not exist, or has not been registered: add it first")
    if engine.world.rank not in members:
        raise ValueError(f"{kind}: rank {engine.world.rank} is not in {process_set}")
    dtypes = tuple(_checked(kind, tensor) for tensor in tensors)
    if len({tensor.device for tensor in tensors}) > 1:
        raise HorovodInternalError("the tensors of a grouped operation must be on one device")
    with _lock:
        handle = _num_handles
        _num_handles += 1
        label = f"{prefix or kind}.{name or _unnamed(kind, number)}"
    device = str(tensors[0].device) if tensors else "cpu"
    request = Request(
        name=label,
        kind=kind,
        process_set=number,
        dtypes=dtypes,
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        device=device,
        **settings,
    )
    ready = None
    if device != "cpu":
        module: Any = torch.get_device_module(tensors[0].device)
        ready = module.Event()
        ready.record(module.current_stream(tensors[0].device))
    entry = Entry(request, tensors, is_in_place=is_in_place, ready=ready)
    engine.enqueue(entry)
    _entries[handle] = entry, results
    return handle


def _checked(kind: str, tensor: Tensor) -> str:
    name = _NAMES.get(tensor.dtype)
    if tensor.is_nested or tensor.is_meta:
        raise ValueError(
            f"{kind} takes dense tensors with values: a nested tensor, or one of the device meta, has none"
        )
    if name is None or (kind in ("allreduce", "reducescatter") and name not in _REDUCED):
        raise ValueError(f"Tensor type {tensor.type()} is not supported.")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{kind} takes dense tensors: use sparse_allreduce_async, or tensor.to_dense()")
    if not tensor.is_contiguous():
        raise ValueError("Tensor is required to be contiguous.")
    return name


def poll(handle: int) -> bool:
    """Return whether a collective is finished, so that `synchronize` does not wait.

    Raises:
        ValueError: There is no such handle.
    """
    found = _entries.get(handle)
    if found is None:
        raise ValueError(f"handle {handle} was not created, or has been waited for")
    return found[0].is_done


def synchronize(handle: int) -> Any:
    """Wait for a collective, and return its result; None for a handle that has been waited for.

    Raises:
        HorovodInternalError: The collective failed.
    """
    found = _entries.pop(handle, None)
    if found is None:
        return None
    entry, results = found
    basics.engine().wait(entry) if basics.is_initialized() else entry.wait()
    if entry.error is not None:
        raise type(entry.error)(*entry.error.args)
    return results(entry)
