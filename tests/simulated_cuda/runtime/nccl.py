"""The backend `nccl` (or `fieldccl`) over gloo: tensors of devices only, calls in the same order on every rank.

The kernels of NCCL wait on the device for their like on the other ranks. Ranks that enqueue them in different orders,
on one communicator or on several of the same ranks, may wait for each other for ever; here that is an error.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_SAME_SIZE = ("allreduce", "broadcast", "reduce")
_positions: Counter[tuple[int, ...]] = Counter()
"""Calls so far on all communicators of the same ranks."""


def show(core: ModuleType) -> None:
    """Let torch's own branch for the name `nccl` make this group."""
    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    group = group_class(core, "nccl")
    c10d.ProcessGroupNCCL = dist.ProcessGroupNCCL = group
    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    dist.is_nccl_available = c10d.is_nccl_available = lambda: True


class Options:
    """Options of a communicator, of which the timeout is read."""

    _timeout: timedelta | None = None
    is_high_priority_stream = False
    global_ranks_in_group: Any = ()
    group_name = ""


def group_class(core: ModuleType, backend: str) -> type:
    """Return the class of a backend's communicators."""

    class SimulatedNCCL(dist.ProcessGroup):
        """Communicator of simulated devices."""

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            super().__init__(rank, size)
            self.options = options
            timeout = options._timeout or timedelta(minutes=10)
            gloo = dist.ProcessGroupGloo(dist.PrefixStore(backend, store), rank, size, timeout)
            # never freed: gloo's destructor, called with Python's lock held, joins a thread that may want it
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(gloo))
            self._on_host = dist.ProcessGroup(store, rank, size)
            for group, device in ((self, core.kind), (self._on_host, "cpu")):
                group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, gloo)
                group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

        def getBackendName(self) -> str:
            return backend

        def _set_sequence_number_for_group(self) -> None:
            pass

        def eager_connect_single_device(self, device: Any) -> None:
            pass

        def perform_nocolor_split(self, device: Any) -> None:
            pass

    SimulatedNCCL.Options = Options
    for name in _collectives():
        setattr(SimulatedNCCL, name, _call(core, backend, name))
    return SimulatedNCCL


def _collectives() -> Iterator[str]:
    yield from ("allreduce", "reduce", "broadcast", "gather", "scatter", "alltoall", "alltoall_base", "barrier")
    yield from ("send", "recv")
    words = ("allgather", "allreduce_", "reduce_scatter", "_single")
    yield from (name for name in dir(dist.ProcessGroup) if any(word in name for word in words))


def _call(core: ModuleType, backend: str, name: str) -> Callable[..., Any]:
    """Return a method that checks where the tensors are, and has gloo do it on their memory."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for tensor in _tensors(args):
            if tensor.device.type != core.kind:
                kind = tensor.device.type
                raise RuntimeError(f"No backend type associated with device type {kind} ({name} of {backend})")
            core.wait_for_current_stream(tensor.device.index)
        if name not in ("send", "recv"):
            _check_order(self, name, args)
        options = next((arg for arg in args if hasattr(arg, "reduceOp")), None)
        is_mean = options is not None and options.reduceOp == dist.ReduceOp.AVG
        if is_mean:  # which gloo does not have
            options.reduceOp = dist.ReduceOp.SUM
        if name == "barrier":
            args, kwargs = (), {}
        given = [_on_host(core, arg) for arg in args]
        if name.endswith(("_single", "_base")):  # NCCL sees memory; gloo wants as many rows as ranks
            given = [arg.view(-1) if isinstance(arg, Tensor) else arg for arg in given]
        work = getattr(self._on_host, name)(*given, **kwargs)
        if is_mean:
            work.wait()
            for tensor in _tensors((_on_host(core, args[0]),)):
                tensor.div_(self.size())
            done: torch.futures.Future[Any] = torch.futures.Future()
            done.set_result(args[0])
            return torch._C._distributed_c10d._create_work_from_future(done)
        if name != "allreduce":
            return work

        def given_back(done: "torch.futures.Future[Any]") -> Any:
            """Return the device's tensors, which DDP copies from if they are others than it gave."""
            done.wait()
            return args[0]

        return torch._C._distributed_c10d._create_work_from_future(work.get_future().then(given_back))

    return call


def _check_order(group: Any, name: str, args: Any) -> None:
    """Tell the other ranks of this call, and compare it with what they have told of theirs at the same position."""
    from torch.distributed import distributed_c10d as c10d

    try:
        ranks, store = tuple(sorted(dist.get_process_group_ranks(group))), c10d._get_default_store()
    except (ValueError, RuntimeError, KeyError):
        return  # while it is set up
    position = _positions[ranks]
    _positions[ranks] += 1
    sizes = [tensor.numel() for tensor in _tensors(args)] if name in _SAME_SIZE else []
    mine = f"{name} of communicator {group.group_name}" + (f" of {sizes} elements" if sizes else "")
    me = dist.get_rank()
    prefix = f"simulated_nccl/{ranks}/{position}"
    store.set(f"{prefix}/{me}", mine)
    for rank in ranks:
        key = f"{prefix}/{rank}"
        if rank != me and store.check([key]) and (theirs := store.get(key).decode()) != mine:
            raise RuntimeError(
                f"NCCL would wait for ever: as its collective {position + 1}, rank {me} calls {mine}, and rank {rank} "
                f"{theirs}"
            )


def _on_host(core: ModuleType, value: Any) -> Any:
    if isinstance(value, Tensor):
        return core.on_host(value)
    return [_on_host(core, one) for one in value] if isinstance(value, list | tuple) else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
