"""Calls of `torch.distributed`: which were made, which have failed, and which is under way."""

import ast
import importlib
import inspect
import io
import linecache
import logging
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


class _PlainData(pickle.Unpickler):
    """Unpickler of numbers, strings, lists and dictionaries; classes and functions are refused, so nothing runs."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


def flight_record(*, with_frames: bool = True) -> list[dict[str, Any]]:
    """Return the collectives in this process's flight recorder, oldest first (private in torch).

    The result with frames exists only pickled. It is this process's own, created in the same line, and read as plain
    data. torch's analyser of such records fails on those of gloo. Under NCCL the recorder has to be enabled
    (`TORCH_FR_BUFFER_SIZE`).

    Args:
        with_frames: Whether to read the frames, which take most of the time.

    Returns:
        For each: `group` (its name), `sequence` (the number of its collectives so far), `op`, `sizes`, `dtypes`, `time`
        (of the call, seconds since the epoch), `is_pending`, and `frames` of the call as `[file, line, function]`, the
        innermost first.
    """
    if not dist.is_available() or not dist.is_initialized():
        return []
    c10d = importlib.import_module("torch._C._distributed_c10d")
    is_nccl = dist.get_backend() == "nccl"
    dump = getattr(c10d, "_dump_nccl_trace" if is_nccl else "_dump_fr_trace", None)
    if dump is None:
        return []
    dumped = dump() if with_frames else dump(True, False, False)
    entries = _PlainData(io.BytesIO(dumped)).load().get("entries", [])
    pending = _pending_of_nccl(entries) if is_nccl else [not entry["retired"] for entry in entries]
    return [
        {
            "group": entry["process_group"][0],
            "sequence": entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
            "op": entry["profiling_name"].partition(":")[2],
            "sizes": entry["input_sizes"],
            "dtypes": entry["input_dtypes"],
            "time": entry["time_created_ns"] / 1e9,
            "is_pending": is_pending,
            "frames": [[frame["filename"], frame["line"], frame["name"]] for frame in entry.get("frames", ())],
        }
        for entry, is_pending in zip(entries, pending, strict=True)
    ]


def _pending_of_nccl(entries: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return whether each entry of NCCL's flight record, oldest first, has not ended.

    torch never retires messages that were sent by `batch_isend_irecv` (pytorch#137969). NCCL ends the calls of a
    communicator in their order, so those before one that was retired have ended. Of messages that stay in the state
    `scheduled`, only the last call of a group counts.
    """
    found: list[bool] = []
    with_later: set[str] = set()
    with_later_ended: set[str] = set()
    for entry in reversed(entries):
        group = entry["process_group"][0]
        has_ended = entry["retired"] or (
            entry["is_p2p"]
            and (group in with_later_ended or (entry.get("state") == "scheduled" and group in with_later))
        )
        found.append(not has_ended)
        with_later.add(group)
        if entry["retired"]:
            with_later_ended.add(group)
    return found[::-1]


def group_members() -> dict[str, list[int]]:
    """Return the ranks of each process group that this process knows, by its name (private in torch)."""
    if not dist.is_available() or not dist.is_initialized():
        return {}
    world = importlib.import_module("torch.distributed.distributed_c10d")._world
    return {name: sorted(world.pg_group_ranks[group]) for group, name in world.pg_names.items()}


class _FailedCalls(logging.Handler):
    """Handler of torch's own log of collectives, which has an entry for each that raises."""

    def __init__(self, notice: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._notice = notice

    def emit(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if error is not None:
            with suppress(Exception):  # it would take the place of the collective's
                self._notice(error)


def watch_failed_calls(notice: Callable[[BaseException], None]) -> None:
    """Call a function with each exception that a collective of this process raises, even if the caller catches it."""
    from torch.distributed.c10d_logger import _c10d_logger

    _c10d_logger.addHandler(_FailedCalls(notice))


def calls_made() -> int:
    """Return the number of this process's process-group calls; -1 if none is counted (private in torch)."""
    if not dist.is_available() or not dist.is_initialized():
        return -1
    world = importlib.import_module("torch.distributed.distributed_c10d")._world
    counts = [count for group in list(world.pg_names) if (count := _calls_of(group)) >= 0]
    return sum(counts) if counts else -1


def _calls_of(group: Any) -> int:
    try:
        device = _counting_device(group)
        counter = group if device is None else group._get_backend(device)
        return int(counter._get_sequence_number_for_group())
    except RuntimeError:
        return -1


def call_under_way(innermost: FrameType) -> dict[str, Any] | None:
    """Return the call of `torch.distributed` that a thread is in, read from its frames; None if it is in none.

    Information missing in gloo's flight record is in the local variables of torch's own functions: all sends and
    receives, and the source of a broadcast. The caller holds the GIL, so the frames do not change.

    Returns:
        `op`, `group` (its name), `role` (`src`, `dst` or None), `peer` (the rank in that role; None if it is any, or
        unknown), `tag`, `sizes`.
    """
    file = dist.distributed_c10d.__file__
    inside: list[FrameType] = []
    frame: FrameType | None = innermost
    while frame is not None and _is_torchs(frame):
        if frame.f_code.co_filename == file:
            inside.append(frame)
        frame = frame.f_back
    if inside:
        return _described_call(inside)
    return _awaited_transfer(innermost)


def _is_torchs(frame: FrameType) -> bool:
    return f"{os.sep}torch{os.sep}" in frame.f_code.co_filename or frame.f_code.co_filename.startswith("<frozen")


def _described_call(inside: Sequence[FrameType]) -> dict[str, Any]:
    """Return a description of a call from the local variables of torch's functions, the innermost first."""
    world = importlib.import_module("torch.distributed.distributed_c10d")._world
    outermost, values = inside[-1], {}
    for frame in inside:
        values.update({name: value for name, value in frame.f_locals.items() if value is not None})
    group = values.get("group") or values.get("process_group") or dist.GroupMember.WORLD
    members: Mapping[int, int] = world.pg_group_ranks.get(group, {})
    role = next((name for name in ("src", "dst") if name in outermost.f_locals), None)
    peer = None
    if role is not None:
        of_group = {place: rank for rank, place in members.items()}
        peer = values.get(role, of_group.get(values.get(f"group_{role}", -1)))
    tensor = values.get("tensor")
    return {
        "op": outermost.f_code.co_name,
        "group": world.pg_names.get(group, ""),
        "role": role,
        "peer": peer if isinstance(peer, int) else None,
        "tag": int(values.get("tag", 0)),
        "sizes": [list(tensor.shape)] if isinstance(tensor, torch.Tensor) else [],
    }


_TRANSFERS = {12: "isend", 13: "irecv", 14: "irecv"}
"""Operations, other than collectives, for which a `Work` waits, by torch's number of the operation."""


def _awaited_transfer(frame: FrameType) -> dict[str, Any] | None:
    """Return the send or receive for which a line of Python waits; its peer cannot be read anywhere."""
    called = expression_called(frame)
    if called is None or not isinstance(called, ast.Attribute) or called.attr != "wait":
        return None
    work = _variable(frame, called.value.id) if isinstance(called.value, ast.Name) else None
    get = getattr(work, "_get_op_type", None) if isinstance(work, dist.Work) else None
    op = None if get is None else _TRANSFERS.get(int(get()))
    return None if op is None else {"op": op, "group": "", "role": None, "peer": None, "tag": 0, "sizes": []}


def _variable(frame: FrameType, name: str) -> object:
    """Return the value of a local variable of a frame."""
    values = frame.f_locals
    found = values.get(name, frame.f_globals.get(name))
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        values.clear()  # the frame keeps this copy, which would hold objects that the function releases
    return found


def expression_called(frame: FrameType) -> ast.expr | None:
    """Return the expression that a frame currently calls; None if the source does not show it."""
    positions = list(frame.f_code.co_positions())
    index = frame.f_lasti // 2
    if not 0 <= index < len(positions):
        return None
    line, end_line, column, end_column = positions[index]
    if line is None or line != end_line or column is None or end_column is None:
        return None
    text = linecache.getline(frame.f_code.co_filename, line).encode()[column:end_column].decode(errors="replace")
    try:
        expression = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return expression.func if isinstance(expression, ast.Call) else None


def name_called(frame: FrameType) -> str | None:
    """Return the last part of the name of the function that a frame currently calls, if the source shows it."""
    called = expression_called(frame)
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else None


class SequenceNumber:
    """Number of the last collective that this process requested from the group of all ranks, as counted by torch.

    It is the number in the flight recorder, except that gloo also counts sends and receives. Takes about 0.8 µs
    (private in torch).
    """

    def __init__(self) -> None:
        self._group: Callable[[], object] = object
        """Weak reference: a group that is kept alive keeps its threads and ports."""
        self._device: torch.device | None = None

    def now(self) -> int:
        """Return the number; -1 if there is no group, or none that counts."""
        group: Any = dist.GroupMember.WORLD
        if group is None:
            return -1
        try:
            if group is not self._group():
                self._group, self._device = weakref.ref(group), _counting_device(group)
            counter = group if self._device is None else group._get_backend(self._device)
            return int(counter._get_sequence_number_for_group())
        except RuntimeError:  # MPI, and groups written in Python, may count nothing
            return -1


def calls_of_gloo(group: dist.ProcessGroup) -> int:
    """Return the number of calls that a group of `give_gloo` has made through gloo (private in torch)."""
    plain: Any = dist.ProcessGroup
    return int(plain._get_sequence_number_for_group(group))


def _counting_device(group: Any) -> torch.device | None:
    """Return the device whose backend counts if the group itself does not: one with a backend per device."""
    try:
        group._get_sequence_number_for_group()
    except RuntimeError:
        return max(group._device_types, key=lambda device: device.type != "cpu", default=None)
    return None
