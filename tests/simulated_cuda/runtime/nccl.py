"""The backend `nccl` (or `fieldccl`) over gloo: tensors of devices only, calls in the same order on every rank.

The kernels of NCCL wait on the device for their like on the other ranks. Ranks that enqueue them in different orders,
on one communicator or on several of the same ranks, may wait for each other for ever; here that is an error. Results
are there for those who have waited. Nobody notices a rank that is lost: the others wait until the timeout, which ends
them.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_SAME_SIZE = ("allreduce", "broadcast", "reduce")
_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
_NO_BITS = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
_NO_NUMBERS = (torch.int16, torch.complex32)
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
            self.patience = timeout.total_seconds()
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
        options = next((arg for arg in args if hasattr(arg, "reduceOp")), None)
        for tensor in _tensors(args):
            _check_tensor(core.kind, backend, tensor, name)
            core.wait_for_current_stream(tensor.device.index)
        if options is not None and any(options.reduceOp == one for one in _NO_BITS):
            raise ValueError(f"Cannot use {options.reduceOp} with NCCL")
        if name not in ("send", "recv"):
            _check_order(self, name, args)
        is_mean = options is not None and options.reduceOp == dist.ReduceOp.AVG
        if is_mean:  # which gloo does not have
            options.reduceOp = dist.ReduceOp.SUM
        if name == "barrier":
            args, kwargs = (), {}
        given = [_on_host(core, arg) for arg in args]
        places = list(_tensors(given[:1])) if name != "send" else []
        # torch's own C++ waits for what it calls; whoever calls torch's functions may forget to
        caller = sys._getframe().f_back
        is_late = caller is not None and caller.f_code.co_filename.endswith("distributed_c10d.py")
        if is_late and places:
            given[0] = _cloned(given[0])
        results = list(_tensors(given[:1])) if name != "send" else []
        if name.endswith(("_single", "_base")):  # NCCL sees memory; gloo wants as many rows as ranks
            given = [arg.view(-1) if isinstance(arg, Tensor) else arg for arg in given]
        work = getattr(self._on_host, name)(*given, **kwargs)

        def arrive() -> None:
            for place, result in zip(places, results, strict=True):
                if is_mean:
                    result.div_(self.size())
                if result is not place:
                    place.copy_(result)

        late = _LateWork(work, arrive, args[0] if args else None, self.patience)
        if is_late:
            return late
        if is_mean:
            late.wait()
            done: torch.futures.Future[Any] = torch.futures.Future()
            done.set_result(args[0])
            return torch._C._distributed_c10d._create_work_from_future(done)
        if name != "allreduce":
            return work

        return torch._C._distributed_c10d._create_work_from_future(late.get_future())

    return call


class _LateWork:
    """Collective whose results arrive when somebody waits."""

    def __init__(self, work: Any, arrive: Callable[[], None], places: Any, patience: float) -> None:
        self._work = work
        self._arrive: Callable[[], None] | None = arrive
        self._places = places
        self._patience = patience

    def wait(self, *timeout: Any) -> bool:
        self._end(lambda: self._work.wait(*timeout))
        return True

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a future of the device's tensors, which DDP copies from if they are others than it gave."""

        def given_back(done: "torch.futures.Future[Any]") -> Any:
            self._end(done.wait)
            return self._places

        return self._work.get_future().then(given_back)

    def _end(self, wait: Callable[[], Any]) -> None:
        with _patience(self._patience):
            wait()
        arrive, self._arrive = self._arrive, None
        if arrive is not None:
            arrive()

    def block_current_stream(self) -> None:
        self.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextlib.contextmanager
def _patience(seconds: float) -> Iterator[None]:
    """Wait as NCCL does for a rank that is lost, and end as its watchdog ends a process."""
    begun = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in _LOST):
            raise
        time.sleep(max(0.0, begun + seconds - time.monotonic()))
        print(f"[Rank {dist.get_rank()}] Watchdog caught collective operation timeout", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGABRT)


def _check_tensor(wanted: str, backend: str, tensor: Tensor, name: str) -> None:
    if (kind := tensor.device.type) != wanted:
        raise RuntimeError(f"No backend type associated with device type {kind} ({name} of {backend})")
    if tensor.is_sparse:
        raise ValueError("Tensors must be CUDA and dense")
    if tensor.dtype in _NO_NUMBERS:
        raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if not tensor.is_contiguous() and not (
        tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])
    ):
        raise ValueError("Tensors must be contiguous")


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return [_cloned(one) for one in value]


def _check_order(group: Any, name: str, args: Any) -> None:
    """Tell the other ranks of this call, and compare it with what they have told of theirs at the same position."""
    from torch.distributed import distributed_c10d as c10d

    try:
        ranks, store = tuple(sorted(dist.get_process_group_ranks(group))), c10d._get_default_store()
    except (ValueError, RuntimeError, KeyError):
        return  # while it is set up
    position = _positions[ranks]
    _positions[ranks] += 1
    sizes = [f"{tensor.numel()} {tensor.dtype}" for tensor in _tensors(args)] if name in _SAME_SIZE else []
    mine = f"{name} of communicator {group.group_name}" + (f" of {', '.join(sizes)}" if sizes else "")
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
