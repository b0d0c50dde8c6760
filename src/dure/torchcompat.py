"""Private, renamed or warning interfaces of torch, each wrapped once.

The rest of dure calls torch's public, stable names directly and this module for everything else. A new torch version
then means one file to read and one test to run (`tests/test_torchcompat.py`, on 2.11, 2.13 and 2.14).
"""

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import linecache
import logging
import os
import pickle
import re
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from socket import socket
from types import FrameType, FunctionType, ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from dure.errors import EnvironmentLacks, message_of

# -- imports that torch delays -----------------------------------------------------------------------------------


def import_late_parts() -> None:
    """Import modules that torch would import later, at a worse moment. Before a fork and before a process group.

    The first DistributedDataParallel imports `torch._dynamo`: 0.8 to 1.0 s in every rank unless it was imported before
    the fork. That in turn imports `torch.distributed.nn.functional`, whose default arguments then hold the process
    group of that moment, with its store and ports, until the interpreter ends (2.11 and 2.13).
    """
    importlib.import_module("torch.distributed.nn.functional")
    importlib.import_module("torch._dynamo")


# -- collectives -------------------------------------------------------------------------------------------------


def all_gather_single(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Gather every rank's `input` (N,) into `output` (world_size * N,) by rank.

    2.13 has this name and deprecates `all_gather_into_tensor`, the only one that 2.11 has.

    Communication: one blocking all_gather over `group`; sends (world_size - 1) * N elements per rank.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, input, group=group)


def reduce_scatter_single(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum every rank's `input` (world_size * N,) and store part `rank` of it in `output` (N,).

    2.13 has this name and deprecates `reduce_scatter_tensor`, the only one that 2.11 has.

    Communication: one blocking reduce_scatter over `group`; sends (world_size - 1) * N elements per rank.
    """
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce_scatter(output, input, group=group)


def group_timeout_seconds(group: dist.ProcessGroup | None = None) -> float:
    """Return the timeout of collectives of CPU tensors over `group` (private in torch)."""
    backend = (group or dist.distributed_c10d._get_default_group())._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds()


def default_store() -> dist.Store:
    """Return the store of the default group (private in torch)."""
    return dist.distributed_c10d._get_default_store()


def abort_process_groups() -> None:
    """Destroy every process group without waiting for other ranks (private in torch; for the backends of devices).

    `destroy_process_group` shuts NCCL's communicators down in an orderly way, which waits for calls in progress. Ranks
    that wait for this one in a collective never get there.
    """
    dist.distributed_c10d._abort_process_group()


AllgatherOptions = dist.distributed_c10d.AllgatherOptions
"""Options class of a collective that has no public name."""


def give_gloo(
    group: dist.ProcessGroup, store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Set gloo as the backend of a process group written in Python, for every call that it does not override.

    Registering backends is private in torch.

    Args:
        group: An object of a class that inherits from `torch.distributed.ProcessGroup`.
        store: Store of this group alone.
        rank: Rank in this group.
        world_size: World size of this group.
        timeout: Timeout of every call.

    Returns:
        A plain group over the same gloo, for calls that the group overrides but does not support.

    Communication: gloo's rendezvous through the store, blocking.
    """
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world_size, timeout)
    plain = dist.ProcessGroup(store, rank, world_size)
    for one in (group, plain):
        one._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        one._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return plain


class _PlainData(pickle.Unpickler):
    """Unpickler of numbers, strings, lists and dictionaries; classes and functions are refused, so nothing runs."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


def flight_record() -> list[dict[str, Any]]:
    """Return the collectives in this process's flight recorder, oldest first (private in torch).

    The result with frames exists only pickled. It is this process's own, created in the same line, and read as plain
    data. torch's analyser of such records fails on those of gloo. Under NCCL the recorder has to be enabled
    (`TORCH_FR_BUFFER_SIZE`).

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
    entries = _PlainData(io.BytesIO(dump())).load().get("entries", [])
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
            "frames": [[frame["filename"], frame["line"], frame["name"]] for frame in entry["frames"]],
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


# -- stores ------------------------------------------------------------------------------------------------------


def store_on_socket(listener: socket, timeout: timedelta) -> dist.TCPStore:
    """Serve a store on a socket that already listens, so that its port and address are fixed.

    By itself a TCPStore listens on every interface, and a port that was free may be taken before it is used.

    Args:
        listener: A listening TCP socket. The store owns its descriptor from now on.
        timeout: Timeout of a `get` or `wait` of a missing key.
    """
    host, port = listener.getsockname()[:2]
    return dist.TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def store_at(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Connect to a store that another process serves.

    Raises:
        torch.distributed.DistError: Nothing responded within `timeout`.
    """
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


_left_group_at: float | None = None
_calls_when_left = -1


def left_group_at() -> float | None:
    """Return when this process left the group of all ranks, after which others' calls fail; None if it is in one.

    Only a process that has called `meet_at_served_store` knows it.
    """
    return _left_group_at


def calls_made_in_last_group() -> int:
    """Return what `calls_made` does, and after this process has left the group of all ranks, what it did then."""
    return calls_made() if dist.is_initialized() else _calls_when_left


def meet_at_served_store(host: str, port: int) -> None:
    """Make `init_process_group` in this process connect to the store at an address that is already served.

    torch has the variable `TORCHELASTIC_USE_AGENT_STORE` for that. But up to 2.13 a rank 0 that reads `True` serves no
    store at any other address either, and a script with its own address waits for it forever (2.14 compares with
    `MASTER_ADDR`, which such scripts set). With `1`, torch's Python code serves and its C++ code accepts that the port
    is taken, but logs a line, which this prevents.

    The store outlives a group that a script destroys. Its next group has keys of its own there: in those of the last
    one, a fast rank would find the closed address of a slow one, as under torchrun.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # a function has the same name
    groups: Any = dist.distributed_c10d
    create, set_default = rendezvous._create_c10d_store, groups._update_default_pg
    num_formed, is_served = 0, False

    def connect_or_create(
        hostname: str, its_port: int, rank: int, world_size: int, timeout: timedelta, *more: Any
    ) -> Any:
        nonlocal is_served
        is_served = (hostname, its_port) == (host, port)
        if not is_served:
            return create(hostname, its_port, rank, world_size, timeout, *more)
        store = dist.TCPStore(hostname, its_port, world_size, is_master=False, timeout=timeout)
        return dist.PrefixStore(f"group_{num_formed}", store) if num_formed else store

    def count_and_set_default(group: Any) -> None:
        global _left_group_at, _calls_when_left
        nonlocal num_formed, is_served
        _left_group_at = time.time() if group is None else None
        with suppress(Exception):  # a group written in Python may raise anything
            _calls_when_left = calls_made()
        num_formed += is_served and group is not None
        is_served = False
        set_default(group)

    groups._update_default_pg = count_and_set_default
    rendezvous._create_c10d_store = connect_or_create


# -- DistributedDataParallel -------------------------------------------------------------------------------------


def check_reduction(engine: DistributedDataParallel) -> None:
    """Check that backward produced every gradient that DDP reduces: other ranks wait for a missing one.

    Raises:
        RuntimeError: One is missing.
    """
    engine.reducer._check_reducer_finalized()


# -- ZeroRedundancyOptimizer -------------------------------------------------------------------------------------


def divide_optimizer(
    groups: list[dict[str, Any]], take_part: Callable[[list[dict[str, Any]]], Optimizer], *, in_one_message: bool
) -> Optimizer:
    """Assign parameters to the ranks of the default group by torch's ZeroRedundancyOptimizer.

    Importing it raises 67 DeprecationWarnings about `torch.jit` (2.11 and 2.13), so it is imported only here, with
    these warnings suppressed.

    Args:
        groups: Parameter groups with every option of the optimiser, of trainable dense parameters.
        take_part: Function from the groups with only this rank's parameters to the optimiser of these.
        in_one_message: Move the parameters into one buffer per rank, so that a step sends one message of each; they
            must have one dtype and be contiguous. Otherwise each parameter is a message.

    Returns:
        An optimiser with all groups. Its `step` steps this rank's part and sends it to the others. Its state, and
        attributes that are not its own, are those of this rank's part.
    """
    whole = _whole_optimizer_class()(groups, optimizer_class=take_part, parameters_as_bucket_view=in_one_message)
    whole.state = whole.optim.state
    return cast(Optimizer, whole)


@functools.cache
def _whole_optimizer_class() -> type[Any]:
    """Return torch's ZeroRedundancyOptimizer with attributes forwarded to and from the task's own optimiser."""
    engine: Any = import_distributed_optim().ZeroRedundancyOptimizer

    class WholeOptimizer(engine):  # type: ignore[misc]
        __module__ = engine.__module__  # searches of a task's objects skip classes of torch

        def __getattr__(self, name: str) -> Any:
            if "optim" not in vars(self):  # `part` does not exist yet
                raise AttributeError(name)
            return getattr(self.optim, name)

        def __setattr__(self, name: str, value: Any) -> None:
            is_whole = name in vars(self) or hasattr(type(self), name) or not vars(self).get("initialized", False)
            if is_whole:
                super().__setattr__(name, value)
            if not is_whole or (name == "state" and "optim" in vars(self)):
                setattr(self.optim, name, value)

        def __delattr__(self, name: str) -> None:
            if name in vars(self):
                super().__delattr__(name)
            else:
                delattr(self.optim, name)

    return WholeOptimizer


# -- hooks on the step of optimisers ---------------------------------------------------------------------------------


_OPTIMIZERS: Any = importlib.import_module("torch.optim.optimizer")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""Registries of an optimiser's hooks, which are missing if it does not call `Optimizer.__init__`."""


def step_hook_registries(optimizer: Optimizer) -> tuple[Mapping[int, Any], ...]:
    """Return the mappings in which hooks on an optimiser's step are registered (private in torch)."""
    own = [getattr(optimizer, name) for name in _STEP_HOOKS if hasattr(optimizer, name)]
    return (*own, _OPTIMIZERS._global_optimizer_pre_hooks, _OPTIMIZERS._global_optimizer_post_hooks)


def step_hooks(optimizer: Optimizer) -> list[Any]:
    """Return the hooks before and after an optimiser's step, without torch's own (private in torch)."""
    hooks = [hook for registry in step_hook_registries(optimizer) for hook in registry.values()]
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("torch.")]


def is_step_replaced(optimizer: Optimizer) -> bool:
    """Return whether an optimiser has its own step instead of its class's, except for that of torch's schedulers."""
    return "step" in vars(optimizer) and not getattr(optimizer.step, "_wrapped_by_lr_sched", False)


def step_without_hooks(optimizer: Optimizer) -> Callable[..., Any]:
    """Return an optimiser's step without its hooks (private in torch)."""
    step = optimizer.step
    places = [
        *((optimizer, name) for name in _STEP_HOOKS),
        *((_OPTIMIZERS, name) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")),
    ]

    def step_alone(*args: Any, **kwargs: Any) -> Any:
        kept = [getattr(holder, name, OrderedDict()) for holder, name in places]
        for holder, name in places:
            setattr(holder, name, OrderedDict())
        try:
            return step(*args, **kwargs)
        finally:
            for (holder, name), hooks in zip(places, kept, strict=True):
                setattr(holder, name, hooks)

    return step_alone


def share_step_hooks(
    optimizer: Optimizer, part: Optimizer, merge: Callable[[dict[int, Any], dict[int, Any]], dict[int, Any]]
) -> None:
    """Make an optimiser run the hooks of its part's step around its own step, and the part none (private in torch).

    Args:
        optimizer: Optimiser whose step calls that of `part`.
        part: Keeps its hooks, for code that registers and removes them.
        merge: Function from the hooks of the optimiser and those of the part to the hooks that run.
    """
    for name in _STEP_HOOKS:
        setattr(optimizer, name, merge(getattr(optimizer, name), getattr(part, name, {})))
    part.step = step_without_hooks(part)  # type: ignore[method-assign]


@contextmanager
def kept_global_hooks() -> Iterator[None]:
    """Remove hooks on the steps of all optimisers and the calls of all modules that are registered inside the context.

    They are in dictionaries that are private in torch.
    """
    modules: Any = torch.nn.modules.module
    hooks: list[dict[int, Any]] = [
        _OPTIMIZERS._global_optimizer_pre_hooks,
        _OPTIMIZERS._global_optimizer_post_hooks,
        modules._global_forward_pre_hooks,
        modules._global_forward_hooks,
        modules._global_backward_pre_hooks,
        modules._global_backward_hooks,
    ]
    before = [dict(registered) for registered in hooks]
    try:
        yield
    finally:
        for registered, kept in zip(hooks, before, strict=True):
            registered.clear()
            registered.update(kept)


# -- fully_shard and loss scaling ----------------------------------------------------------------------------------


def reduce_unused_too(module: Any) -> bool:
    """Make a sharded module send zeros for parameters that got no gradient on this rank.

    Without it, ranks that used different parameters send messages of different lengths. 2.11 does not support it.

    Args:
        module: Result of `fully_shard`; modules inside it are included.

    Returns:
        Whether it does so from now on.
    """
    if not hasattr(module, "set_reduce_scatter_unused_params"):
        return False
    module.set_reduce_scatter_unused_params(True)
    return True


def found_overflows(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, device: torch.device | None = None
) -> list[Tensor]:
    """Return the overflow flags of a scaler after unscaling: one number per device, above 0 if a gradient overflowed.

    They are the live tensors: ranks with other parts of the gradients add theirs in them (private in torch).

    Args:
        scaler: Scaler after `unscale_`.
        optimizer: Unscaled optimiser.
        device: Device of the number for an optimiser without any gradient; without a number no step is taken.
    """
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    if device is not None and not found:
        found[device] = torch.zeros((), dtype=torch.float32, device=device)
    return list(cast(dict[torch.device, Tensor], found).values())


# -- RPC -----------------------------------------------------------------------------------------------------------

_RPC_SCHEME = "dure"
_rpc_meetings: list[tuple[dist.Store, int, int]] = []
"""Store, rank and world size of the running agent."""
_registered_schemes: set[str] = set()


def start_rpc(name: str, rank: int, world_size: int, timeout_seconds: float, *, by_memory: bool = False) -> None:
    """Start this process's RPC agent over the default group's store (private in torch).

    With `by_memory`, agents of one host connect over kernel sockets without a port, and exchange bytes in unnamed
    memory. An agent that listens at a port reads a length from any client, and allocates that much memory: a port
    scanner's `GET / HTTP/1.0` aborts its process (TensorPipe in torch 2.11 to 2.13), before any Python code runs. The
    names of transports and channels are private in torch.

    `init_rpc` finds its store by a URL, and a URL can only name an address: a scheme of dure's own passes an existing
    store. Its warnings are about torch's own code (2.11 and 2.13).
    """
    from torch.distributed import rpc
    from torch.distributed.rendezvous import register_rendezvous_handler

    if _RPC_SCHEME not in _registered_schemes:
        register_rendezvous_handler(_RPC_SCHEME, _meet_for_rpc)
        _registered_schemes.add(_RPC_SCHEME)
    _rpc_meetings[:] = [(dist.PrefixStore("rpc", default_store()), rank, world_size)]
    ways: dict[str, Any] = {"_transports": ["shm"], "_channels": ["cma", "basic"]} if by_memory else {}
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"{_RPC_SCHEME}://", rpc_timeout=timeout_seconds, **ways)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)


def _meet_for_rpc(url: str, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    yield _rpc_meetings[-1]


def stop_rpc(timeout_seconds: float) -> None:
    """Shut this process's RPC agent down together with all others, after all calls, and release the store.

    Args:
        timeout_seconds: Timeout for the others; without it the wait for a dead one would never end.
    """
    from torch.distributed import rpc

    rpc.shutdown(timeout=timeout_seconds)
    _rpc_meetings.clear()


def import_distributed_optim() -> ModuleType:
    """Import `torch.distributed.optim`, which raises 67 DeprecationWarnings about `torch.jit` (2.11 and 2.13).

    Unpickling one of its objects, as RPC does, also imports it: import it before.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("torch.distributed.optim")


def optimizer_of_references(optimizer_class: Callable[[list[nn.Parameter]], Any], references: list[Any]) -> Any:
    """Return a DistributedOptimizer over remote parameters.

    It logs a warning for every class that is not torch's own.

    Args:
        optimizer_class: A function of a module; called on each owner with its parameters.
        references: An RRef to each parameter.

    Communication: one remote call to each owner, blocking.
    """
    optim = import_distributed_optim()
    log = logging.getLogger("torch.distributed.optim.optimizer")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        return optim.DistributedOptimizer(optimizer_class, references)
    finally:
        log.setLevel(level)


# -- modules, tensors and generators -----------------------------------------------------------------------------

_MODULE_CALL = "_compiled_call_impl"

BatchNorm = nn.modules.batchnorm._BatchNorm
"""Base class of every BatchNorm, including torch's own SyncBatchNorm (private in torch)."""

Dropout = nn.modules.dropout._DropoutNd
"""Base class of every dropout module (private in torch)."""


MODULE_CONTENTS = attrgetter("_parameters", "_buffers", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks")
"""Dictionaries of a module on which its `state_dict` depends, in addition to its class (private in torch)."""

_PLAIN_STATE = ("state_dict", "_save_to_state_dict", "get_extra_state")


def has_plain_state(module: nn.Module) -> bool:
    """Return whether a module's `state_dict` contains its parameters and persistent buffers and nothing else.

    Hooks of torch itself are considered harmless: those of `fully_shard` convert the parameters into shards.
    """
    hooks = [*module._state_dict_hooks.values(), *module._state_dict_pre_hooks.values()]
    return (
        all(getattr(type(module), name) is getattr(nn.Module, name) for name in _PLAIN_STATE)
        and not any(name in vars(module) for name in _PLAIN_STATE)
        and all(str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks)
    )


def has_plain_optimizer_state(optimizer: Optimizer) -> bool:
    """Return whether an optimiser's `state_dict` has its unchanged `state` and `param_groups`, and nothing else."""
    if type(optimizer).state_dict is not Optimizer.state_dict or "state_dict" in vars(optimizer):
        return False  # a wrapper that did not call the constructor may lack the hooks
    return not (optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor that holds a DTensor's values on this rank (private in torch); others are returned as is."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def compiled_modules(model: nn.Module) -> list[str]:
    """Return the names of modules that the task itself has compiled, with `torch.compile` or `compile()`."""
    return [
        name
        for name, module in model.named_modules()
        if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None
    ]


def read_whole_numbers() -> None:
    """Let a number that is read from a DTensor be that of the whole in this process (private in torch).

    By itself `.item()` of a sum over shards is that of this rank's shard. Every rank of the mesh must read it.
    """
    from torch.distributed.tensor import DTensor, Replicate

    def read(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (value,) = args
        return operator(value.redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local())

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = read


def divided_like(parameter: Any, local: Tensor) -> Tensor:
    """Return a DTensor of a rank's part, divided like a parameter; it stays on its device (private in torch).

    `DTensor.from_local` would move a part in host memory to the devices of the mesh.
    """
    from torch.distributed.tensor import DTensor  # takes 0.4 s to import, and is there where a parameter is one

    spec = parameter._spec
    constructor: Any = DTensor
    whole: Tensor = constructor(
        local, replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype)), requires_grad=False
    )
    return whole


def multiply_(tensors: list[Tensor], factor: "Tensor | float") -> None:
    """Multiply tensors in place by one factor, in one call for all that share device and dtype (private in torch)."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def copy_all(targets: list[Tensor], sources: list[Tensor], *, non_blocking: bool = False) -> None:
    """Copy tensors into others of the same shapes, in as few calls as devices and dtypes permit (private in torch)."""
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def give_data(tensor: Tensor, data: Tensor) -> None:
    """Give a tensor other memory, as `tensor.data = data` does; it stays the same object, with its hooks.

    torch refuses that between the host and kinds of devices from outside (PrivateUse1), whose tensors have another
    implementation. There the two implementations are swapped (private in torch).
    """
    if torch._has_compatible_shallow_copy_type(tensor, data):
        tensor.data = data
        return
    moved: Any = data.detach().requires_grad_(tensor.requires_grad)
    owner: Any = tensor
    torch._C._swap_tensor_impl(owner, moved)
    # their C++ side stayed with the other implementation
    owner._backward_hooks = owner._backward_hooks
    owner._post_accumulate_grad_hooks = owner._post_accumulate_grad_hooks


def move_module(module: nn.Module, device: torch.device | str) -> nn.Module:
    """Move a module to a device, as `module.to(device)` does; parameters stay the same objects.

    By itself torch makes other parameters of those that it moves to kinds of devices from outside, and tied ones would
    be tied no longer.
    """
    there = torch.empty(0, device=device)
    for parameter in module.parameters():
        if not torch._has_compatible_shallow_copy_type(parameter, there):
            gradient = parameter.grad
            give_data(parameter, parameter.detach().to(device))
            parameter.grad = None if gradient is None else gradient.to(device)
    return module.to(device)


def has_inductor_for(device_type: str) -> bool:
    """Return whether Inductor generates code for a type of device (private in torch); the import takes seconds."""
    common: Any = importlib.import_module("torch._inductor.codegen.common")
    common.init_backend_registration()
    return common.get_scheduling_for_device(device_type) is not None


def pin_host_memory(address: int, num_bytes: int) -> bool:
    """Lock pages of the host, so that CUDA copies into them asynchronously; return whether that succeeded.

    `pin_memory` allocates new memory; this is for existing memory.
    """
    runtime = torch.cuda.cudart()
    if runtime is None:  # another kind of device, or one with a compatible API under CUDA's name
        return False
    is_pinned = int(runtime.cudaHostRegister(address, num_bytes, 0)) == 0
    if not is_pinned:
        with suppress(RuntimeError):  # the error is kept until the next kernel, which would raise it
            torch.zeros((), device=torch.accelerator.current_accelerator())
    return is_pinned


def unpin_host_memory(address: int) -> None:
    """Undo `pin_host_memory`."""
    torch.cuda.cudart().cudaHostUnregister(address)


def default_generator(device: torch.device) -> Generator:
    """Return the generator that random functions use by default on `device`.

    `torch.accelerator` has no function for it, and every backend has another name for it.
    """
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    module = torch.get_device_module(device)
    index = device.index if device.index is not None else module.current_device()
    if not hasattr(module, "default_generators"):  # a kind of device from outside has the states only
        return cast(Generator, _GeneratorOfModule(module, torch.device(device.type, index)))
    return cast(Generator, module.default_generators[index])


class _GeneratorOfModule:
    """Default generator of a device, by the functions that torch requires of modules of devices from outside."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self.device = device

    def get_state(self) -> Tensor:
        return cast(Tensor, self._module.get_rng_state(self.device))

    def set_state(self, state: Tensor) -> "_GeneratorOfModule":
        self._module.set_rng_state(state, self.device)
        return self

    def manual_seed(self, seed: int) -> "_GeneratorOfModule":
        return self.set_state(torch.Generator(self.device).manual_seed(seed).get_state())


def gradient_hooks_of(tensor: Tensor) -> list[Any]:
    """Return the hooks on a tensor's gradient (private in torch)."""
    hooks: Any = tensor
    return [*(hooks._backward_hooks or {}).values(), *(hooks._post_accumulate_grad_hooks or {}).values()]


def has_accumulation_hooks(tensor: Tensor) -> bool:
    """Return whether a tensor has hooks that are called once its `.grad` has been added to (private in torch)."""
    hooks: Any = tensor
    return bool(hooks._post_accumulate_grad_hooks)


def keep_gradient_hooks(tensor: Tensor) -> Callable[[], None]:
    """Return a function that removes hooks on a tensor's gradient that are registered later (private in torch)."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    before = {name: dict(getattr(tensor, name) or {}) for name in names}

    def undo() -> None:
        for name, hooks in before.items():
            now = getattr(tensor, name)  # the engine keeps this same dictionary
            if now is not None and now != hooks:
                now.clear()
                now.update(hooks)

    return undo


@contextmanager
def without_gradient_hooks(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Call no hooks on the gradients of the tensors inside the context (private in torch)."""
    taken: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for tensor in tensors:
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            if hooks := getattr(tensor, name):
                taken.append((hooks, dict(hooks)))
                hooks.clear()  # the engine keeps this same dictionary
    try:
        yield
    finally:
        for hooks, before in taken:
            hooks.update(before)


def own_attributes(tensor: Tensor) -> dict[str, Any]:
    """Return the attributes that were set on a tensor, without those of torch's own classes of tensors."""
    return {name: value for name, value in vars(tensor).items() if name not in ("_local_tensor", "_spec")}


_OF_ONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "NODE_RANK": "0",
    "GROUP_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
}
"""Environment variables of ranks, with their values for the only process of a run."""
_COUNTS = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
_READERS = ("os", "_collections_abc", "collections.abc", "torch.distributed", "torch.distributed.distributed_c10d")
"""Modules through which other code reads the number of ranks."""


@contextmanager
def as_one_process() -> Iterator[None]:
    """Run code with the environment of a run of one process, without a process group (private in torch)."""
    member: Any = dist.GroupMember
    group, before = member.WORLD, {name: os.environ[name] for name in _OF_ONE if name in os.environ}
    os.environ.update((name, _OF_ONE[name]) for name in before)
    member.WORLD = None
    try:
        yield
    finally:
        member.WORLD = group
        os.environ.update(before)


@contextmanager
def reads_of_world_size() -> Iterator[list[str]]:
    """Record where code that is neither dure's nor torch's own reads the number of ranks (private in torch and `os`).

    Yields:
        `file:line` of each read, of the environment or by `torch.distributed`; filled during the context.
    """
    found: list[str] = []
    environ: Any = type(os.environ)
    torch_collectives: Any = torch.distributed.distributed_c10d
    read_variable, group_size = environ.__getitem__, torch_collectives._get_group_size

    def note() -> None:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_globals.get("__name__") in _READERS:
            frame = frame.f_back
        if not str(frame.f_globals.get("__name__")).startswith(("dure.", "torch.")):
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")

    def noted_variable(self: Any, key: Any) -> Any:
        value = read_variable(self, key)
        if key in _COUNTS:
            note()
        return value

    def noted_size(group: Any) -> Any:
        note()
        return group_size(group)

    environ.__getitem__, torch_collectives._get_group_size = noted_variable, noted_size
    try:
        yield found
    finally:
        environ.__getitem__, torch_collectives._get_group_size = read_variable, group_size


@contextmanager
def replaced_collectives(instead: Callable[[str, Callable[..., Any]], Any]) -> Iterator[None]:
    """Replace the collectives of torch.distributed in all modules that imported them.

    Each is a function in a wrapper that logs errors, and the wrapper finds it in its closure (private in torch).

    Args:
        instead: Function from a collective's name and function to the function to call.
    """
    cells: list[tuple[Any, Any]] = []
    for name, function in vars(torch.distributed.distributed_c10d).items():
        is_logged = type(function) is FunctionType and "func" in function.__code__.co_freevars
        if is_logged and hasattr(function, "__wrapped__"):
            cell = function.__closure__[function.__code__.co_freevars.index("func")]
            cells.append((cell, cell.cell_contents))
            cell.cell_contents = instead(name, cell.cell_contents)
    try:
        yield
    finally:
        for cell, contents in cells:
            cell.cell_contents = contents


def module_call(module: torch.nn.Module) -> Callable[..., Any]:
    """Return the function that a call of a module runs, including hooks (private in torch)."""
    given: Any = module.__dict__.get(_MODULE_CALL)
    return module._call_impl if given is None else cast(Callable[..., Any], given)


def replace_module_call(module: torch.nn.Module, call: Callable[..., Any]) -> Callable[[], None]:
    """Make calls of a module run another function, as `nn.Module.compile` does (private in torch).

    Returns:
        Function that restores the original one.
    """
    before = module.__dict__.get(_MODULE_CALL)
    module.__dict__[_MODULE_CALL] = call

    def undo() -> None:
        if before is None:
            module.__dict__.pop(_MODULE_CALL, None)
        else:
            module.__dict__[_MODULE_CALL] = before

    return undo


def bind_to_numa_node(device: int, mode: str) -> None:
    """Bind the threads of this process to the cores near a CUDA device (private in torch, whose launcher does it).

    Args:
        device: Index of the device.
        mode: Name of a `torch.numa.binding.AffinityMode`.

    Raises:
        EnvironmentLacks: The system does not tell which cores are near it, or does not allow them.
    """
    try:
        from torch.numa import binding

        options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode), should_fall_back_if_binding_fails=False)
        log, level = binding.logger, binding.logger.level
        log.setLevel(logging.CRITICAL)
        try:
            apply: Any = binding._maybe_apply_numa_binding_to_current_process
            index, others = inspect.signature(apply).parameters  # `device_index` since torch 2.14
            apply(**{index: device, others: options})
        finally:
            log.setLevel(level)
    except Exception as error:
        raise EnvironmentLacks(
            f"numa_binding is {mode}, and the cores near device {device} cannot be used "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}): leave it out"
        ) from error


def buffer_option(*, sends_in_forward: bool) -> dict[str, Any]:
    """Return the argument of DDP for rank 0's buffers, which has another name since torch 2.13."""
    names = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": sends_in_forward}


def as_written(value: Any) -> Any:
    """Return the function of which `torch.compile` made another, or the value itself (private in torch)."""
    return vars(value).get("_torchdynamo_orig_callable", value) if isinstance(value, FunctionType) else value


def without_overrides() -> AbstractContextManager[Any]:
    """Return a context in which operations treat subclasses of Tensor as plain tensors (private in torch)."""
    return torch._C.DisableTorchFunctionSubclass()


def without_function_modes() -> AbstractContextManager[Any]:
    """Return a context in which neither modes nor subclasses of Tensor see operations (private in torch)."""
    return torch._C.DisableTorchFunction()


class _WithoutCompilation:
    """Context of `without_compilation`; torch's stance is one for all threads, so the last one to leave restores it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            # unless it was imported nothing is compiled, and the import takes a second
            if not self._num_inside and "torch._dynamo" in sys.modules:
                self._stance = torch.compiler.set_stance("force_eager")
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside and self._stance is not None:
                stance, self._stance = self._stance, None
                stance.__exit__(None, None, None)


_without_compilation = _WithoutCompilation()


def without_compilation() -> AbstractContextManager[None]:
    """Return a context in which functions and models that `torch.compile` made run as they are written.

    Compiled code does not see modes of `__torch_function__`, nor calls of modules that were replaced.
    """
    return _without_compilation


_as_written = threading.local()


def _is_all_as_written() -> bool:
    return bool(getattr(_as_written, "is_set", False))


@contextmanager
def all_as_written() -> Iterator[None]:
    """Let this thread run compiled code as it is written, that of `with_compilation` too."""
    before = _is_all_as_written()
    _as_written.is_set = True
    try:
        with without_compilation():
            yield
    finally:
        _as_written.is_set = before


def with_compilation(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs compiled code as such, even inside of `without_compilation`."""

    @functools.wraps(compiled)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _is_all_as_written():
            return compiled(*args, **kwargs)
        with torch.compiler.set_stance("default"):
            return compiled(*args, **kwargs)

    return run


class EagerDispatchMode(TorchDispatchMode):
    """Mode of `__torch_dispatch__` for use where nothing is compiled.

    Torch keeps the compiler away from `__torch_dispatch__`, which takes three times as long as a short operation.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def is_operator(func: object) -> bool:
    """Return whether a function is one of `torch.ops`, as public ones are below autograd (private in torch)."""
    return isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket)


@contextmanager
def modes_in_backward() -> Iterator[None]:
    """Enter the context in which a function mode sees what a backward computes: checkpoints, hooks (private in torch).

    torch takes `backward` and `grad` for functions that a mode handles, and leaves the mode while it does so.
    """
    own = torch.autograd.has_torch_function
    torch.autograd.has_torch_function = lambda args: False
    try:
        yield
    finally:
        torch.autograd.has_torch_function = own


def has_saved_tensors_hooks() -> bool:
    """Return whether hooks get what autograd saves now, as those of an activation checkpoint (private in torch)."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def is_below_autograd() -> bool:
    """Return whether a call comes from within torch's dispatch, where no gradient is recorded (private in torch)."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)


def schemas_of(operator: Any) -> list[Any]:
    """Return the schemas of one of `torch.ops`: of an overload its own, of a packet those of all (private in torch)."""
    if isinstance(operator, torch._ops.OpOverload):
        return [operator._schema]
    return [getattr(operator, name)._schema for name in operator.overloads()]


@contextmanager
def watched_parametrizations(cached: Callable[[], Any]) -> Iterator[None]:
    """Call a function on each look-up in the cache of `torch.nn.utils.parametrize.cached` (private in torch)."""
    parametrize: Any = nn.utils.parametrize

    class Watched(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            cached()
            return super().get(key, default)

    before, parametrize._cache = parametrize._cache, Watched()
    try:
        yield
    finally:
        parametrize._cache = before


@contextmanager
def entered_autocasts(*, are_off: bool = False) -> Iterator[list[torch.autocast]]:
    """Record the autocasts that are entered and that change dtypes (private in torch).

    Args:
        are_off: Whether they change nothing, so that everything is computed in its own dtype.
    """
    found: list[torch.autocast] = []
    kind: Any = torch.autocast
    original = kind.__enter__

    def enter(autocast: Any) -> Any:
        if not autocast._enabled:
            return original(autocast)
        found.append(autocast)
        autocast._enabled = not are_off
        try:
            return original(autocast)
        finally:
            autocast._enabled = True

    kind.__enter__ = enter
    try:
        yield found
    finally:
        kind.__enter__ = original


@contextmanager
def functional_calls_in_turn() -> Iterator[None]:
    """Let one thread at a time compute a `torch.func.functional_call`, or with `torch.func.jvp` (private in torch).

    The first puts the given tensors into its module for as long as it lasts, where another thread would use them.
    Derivatives in forward mode have one level in a process, which another thread would leave too early.
    """
    stateless: Any = importlib.import_module("torch.nn.utils.stateless")
    transforms: Any = importlib.import_module("torch._functorch.eager_transforms")
    level: Any = torch.autograd.forward_ad.dual_level
    original, nested, entered, left = (
        stateless._reparametrize_module,
        transforms.jvp_increment_nesting,
        level.__enter__,
        level.__exit__,
    )
    lock = threading.RLock()  # calls inside of calls

    @contextmanager
    def in_turn(*args: Any, **kwargs: Any) -> Iterator[None]:
        with lock, original(*args, **kwargs):
            yield

    @contextmanager
    def nested_in_turn() -> Iterator[int]:
        with lock, nested() as depth:
            yield depth

    def enter(self: Any) -> Any:
        lock.acquire()
        try:
            return entered(self)
        except BaseException:
            lock.release()
            raise

    def leave(self: Any, *error: Any) -> None:
        try:
            left(self, *error)
        finally:
            lock.release()

    stateless._reparametrize_module, transforms.jvp_increment_nesting = in_turn, nested_in_turn
    level.__enter__, level.__exit__ = enter, leave
    try:
        yield
    finally:
        stateless._reparametrize_module, transforms.jvp_increment_nesting = original, nested
        level.__enter__, level.__exit__ = entered, left


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as bytes in one dimension: a view of its memory if it is contiguous.

    `view` requires an innermost stride of 1. A dimension of size 1 keeps any other stride, through `contiguous` and
    `reshape` too: a column of a batch of one sample has that of its row.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.stride(0) != 1:
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def copy_gradient_hooks(source: Tensor, target: Tensor) -> None:
    """Register the hooks on one tensor's gradient on another's (private in torch)."""
    hooks: Any = source
    for hook in (hooks._backward_hooks or {}).values():
        target.register_hook(hook)
    for hook in (hooks._post_accumulate_grad_hooks or {}).values():
        target.register_post_accumulate_grad_hook(hook)


def has_modes_of_thread() -> bool:
    """Return whether this thread has modes of functions or dispatch, or hooks on saved tensors (private in torch)."""
    return bool(
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._autograd._top_saved_tensors_default_hooks(True)
    )


def is_transforming() -> bool:
    """Return whether a function transform of `torch.func`, such as `vmap`, is active (private in torch)."""
    return torch._C._functorch.peek_interpreter_stack() is not None


# -- backward ----------------------------------------------------------------------------------------------------

_ones: dict[torch.dtype, Tensor] = {}


def run_backward(loss: Tensor, *others: tuple[Tensor, Tensor]) -> None:
    """Accumulate gradients from a scalar loss, and from other tensors with given gradients, in one backward.

    It does what `torch.autograd.backward` does, on the CPU by the engine's own entry point (private in torch). The
    checks before it, and the context that 2.13 keeps for the threads of other devices, cost 25 to 45 us of every step
    there.

    Args:
        loss: Scalar; its gradient is one.
        others: Tensors and their gradients.
    """
    tensors, gradients = zip(*others, strict=True) if others else ((), ())
    if loss.device.type != "cpu":
        torch.autograd.backward((loss, *tensors), (None, *gradients))
        return
    if loss.dtype not in _ones:
        _ones[loss.dtype] = torch.ones((), dtype=loss.dtype)
    torch.autograd.Variable._execution_engine.run_backward(
        (loss, *tensors),
        (_ones[loss.dtype], *gradients),
        False,  # keep_graph
        False,  # create_graph
        (),  # inputs
        allow_unreachable=True,
        accumulate_grad=True,
    )


def settle_engine() -> None:
    """Prepare autograd's engine for forward and backward from several threads at once. Before the threads.

    In a child of a process that had run a backward itself, the first operation that saves a tensor for backward
    destroys the engine and builds another, without a lock (`PythonEngine::get_python_engine`, 2.13). Threads that did
    so at the same time crashed: 15 of 800 runs in which each ran a backward, 6 of 540 with forward alone; after this
    call none.
    """
    torch.zeros(1, requires_grad=True).sum().backward()


# -- torchvision -------------------------------------------------------------------------------------------------

_kept_alive: list[torch.library.Library] = []
"""Library objects, kept because an operator's schema disappears with the object that declared it."""


def repair_torchvision() -> bool:
    """Make `import torchvision` work with a torch build for which its binary part was not made.

    The registry's torchvision 0.28.0 does not load its compiled operators with torch 2.13.0+cpu, and its import then
    fails with `operator torchvision::nms does not exist`. Declaring the two schemas to which the import refers is
    enough for models, transforms and data sets; the operators themselves stay missing. Does nothing if torchvision is
    missing or intact, or if called again.

    Returns:
        Whether schemas were declared.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _has_operator("nms"):
        return False
    for library in Path(spec.origin).parent.glob("_C*.so"):
        try:
            # a later declaration by the library itself would be an error: load the real one first
            torch.ops.load_library(library)
        except OSError:
            continue
    missing = [name for name in ("nms", "qnms") if not _has_operator(name)]
    if "nms" not in missing:
        return False
    declarations = torch.library.Library("torchvision", "DEF")
    for name in missing:
        declarations.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept_alive.append(declarations)
    return True


_SIGNS_OF_ANOTHER_TORCH = re.compile(
    r"operator \w+::\w+ does not exist|undefined symbol: \w*(torch|c10|at)|"
    r"module 'torch[\w.]*' has no attribute|cannot import name '\w+' from 'torch"
)
"""Errors of Python and torch about a library that was made for another version or build of torch."""


def library_for_another_torch(error: BaseException) -> str | None:
    """Return a sentence about a library that is incompatible with this torch, if that caused the error, or None."""
    if not _SIGNS_OF_ANOTHER_TORCH.search(message_of(error)):
        return None
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    inside = [found[-1] for file in files if (found := re.findall(r"/(?:site|dist)-packages/([^/.]+)", file))]
    name = next((name for name in reversed(inside) if name not in ("torch", "dure")), None)
    if name is None:
        return None
    try:
        version = f" {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        version = ""
    return (
        f"{name}{version} does not fit torch {torch.__version__} ({error}): install a pair that was made together, "
        f"as `pip install --upgrade torch {name}` does"
    )


def import_torchvision() -> ModuleType:
    """Import torchvision, repaired if its binary part does not fit this torch.

    Raises:
        EnvironmentLacks: torchvision is not installed.
    """
    repair_torchvision()
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("torchvision", "PIL"):
            raise
        raise EnvironmentLacks(
            f"{error.name} is not installed, but this task needs torchvision: pip install 'dure[vision]'"
        ) from None


def _has_operator(name: str) -> bool:
    namespace: Any = torch.ops.torchvision
    return hasattr(namespace, name)
