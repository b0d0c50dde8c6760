"""The backend `dure_shm` of torch.distributed: the CPU ranks of one host meet in shared memory.

    import dure.comm
    torch.distributed.init_process_group("cpu:dure_shm")

What DDP, FSDP2 and broadcasts need goes through the memory: all_reduce, broadcast, all_gather, reduce_scatter in all
their forms, barrier. The rest (send, recv, gather, scatter, all_to_all, reduce) goes through a gloo group that every
group brings along, and so does everything of a group whose ranks cannot share memory.

Calls run in the order in which they were made. Asynchronous ones run on one thread per group, so that DDP computes
while its gradients are added up; a blocking call with none before it runs where it was made.
"""

import os
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dure.comm import shm_collectives
from dure.comm.algorithms.shm import all_reduce, slot_bytes_for
from dure.comm.shared_memory import SharedMemory, open_shared_memory
from dure.comm.shm_work import SharedMemoryWork, run_works
from dure.errors import EnvironmentLacks
from dure.torchcompat import AllgatherOptions, calls_of_gloo, give_gloo

NAME = "dure_shm"

_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}
_WHOLE = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
_REAL = {torch.float64, torch.float32, torch.float16, torch.bfloat16, *_WHOLE}
_COMPLEX = {torch.complex64, torch.complex128}
_REDUCIBLE = {
    "sum": _REAL | _COMPLEX,
    "mean": _REAL | _COMPLEX,
    "max": _REAL,
    "min": _REAL,
    "product": _REAL,
    "band": _WHOLE,
    "bor": _WHOLE,
    "bxor": _WHOLE,
}

_NONE: set[torch.dtype] = set()

_GRACE_SECONDS = 1.0
"""How long calls that nobody waited for may go on when the group is destroyed."""


class SharedMemoryGroup(dist.ProcessGroup):
    """A process group over shared memory, for CPU tensors.

    torch calls these methods, from Python and from C++, under the names of its own groups; those of 2.13 and those
    of 2.11 both. What is not overridden goes to the base class and by it to gloo.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, timeout: timedelta, global_ranks: Sequence[int]
    ) -> None:
        """Connect gloo, and make the memory if all ranks can. Every rank calls it.

        Communication: gloo's rendezvous through the store, then two all_gather of a few numbers.

        Args:
            store: Of this group alone.
            rank: In this group.
            world_size: Of this group.
            timeout: How long a call waits for a rank.
            global_ranks: What the ranks are called in errors; empty calls them by their rank here.
        """
        super().__init__(rank, world_size)  # type: ignore[call-arg]  # the only one that a class of Python may call
        self._store = store
        self._gloo = give_gloo(self, store, rank, world_size, timeout)
        self._timeout_seconds = timeout.total_seconds()
        self._pid = os.getpid()
        self._memory: SharedMemory | None = None
        self.why_gloo = ""
        """Why the memory is not used, or nothing."""
        try:
            self._memory = open_shared_memory(
                self._exchange,
                rank=rank,
                world_size=world_size,
                slot_bytes=slot_bytes_for(world_size),
                timeout_seconds=timeout.total_seconds(),
                names=global_ranks or None,
            )
        except EnvironmentLacks as lack:
            self.why_gloo = str(lack)
        self._works: queue.SimpleQueue[SharedMemoryWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: SharedMemoryWork | None = None
        self._order = threading.Lock()
        self._num_started = -calls_of_gloo(self)
        """Calls through the memory, less those of gloo for the meeting here."""

    def _exchange(self, numbers: list[int]) -> list[list[int]]:
        said = [torch.empty(len(numbers), dtype=torch.int64) for _ in range(self.size())]
        self._gloo.allgather([said], [torch.tensor(numbers)]).wait()
        return [tensor.tolist() for tensor in said]

    # -- calls through the memory --------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Reduce tensors over all ranks, in place."""
        tensors, opts = _as_list(tensors), _as_options(dist.AllreduceOptions, opts, timeout)
        op = _OPS.get(opts.reduceOp.op, "")
        if not self._can_reduce(tensors, op):
            return self._gloo.allreduce(tensors, opts)
        return self._start(lambda memory: _all_reduce(memory, tensors, op), tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce tensors over all ranks, in place."""
        opts = _as_options(dist.AllreduceCoalescedOptions, opts)
        op = _OPS.get(opts.reduceOp.op, "")
        if not self._can_reduce(tensors, op):
            return self._gloo.allreduce_coalesced(tensors, opts)
        return self._start(lambda memory: _all_reduce(memory, tensors, op), tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Overwrite tensors with those of one rank."""
        tensors = _as_list(tensors)
        if isinstance(opts, int):
            root, opts = opts, dist.BroadcastOptions()
            opts.rootRank = root
        opts = _as_options(dist.BroadcastOptions, opts, timeout)
        if not self._can_move(tensors):
            return self._gloo.broadcast(tensors, opts)
        root = opts.rootRank
        return self._start(lambda memory: _broadcast(memory, tensors, root), tensors, opts)

    def allgather(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Copy every rank's tensor into a list on all ranks."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _as_options(AllgatherOptions, opts, timeout)
        if not (self._can_move(inputs, *outputs) and all(map(_are_alike, outputs, inputs))):
            return self._gloo.allgather(outputs, inputs, opts)
        return self._start(lambda memory: _all_gather(memory, outputs, inputs), outputs, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Copy every rank's tensor into one long tensor on all ranks; for several tensors."""
        opts = _as_options(AllgatherOptions, opts)
        if not (self._can_move(inputs, outputs) and all(map(self._is_multiple, outputs, inputs))):
            return self._gloo.allgather_into_tensor_coalesced(outputs, inputs, opts)
        lists = [_cut(output, self.size()) for output in outputs]
        return self._start(lambda memory: _all_gather(memory, lists, inputs), outputs, opts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Reduce lists of tensors over all ranks and leave one on each rank."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _as_options(dist.ReduceScatterOptions, opts, timeout)
        op = _OPS.get(opts.reduceOp.op, "")
        if not (self._can_reduce(outputs, op) and self._can_move(*inputs) and all(map(_are_alike, inputs, outputs))):
            return self._gloo.reduce_scatter(outputs, inputs, opts)
        return self._start(lambda memory: _reduce_scatter(memory, outputs, inputs, op), outputs, opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce long tensors over all ranks and leave each rank its part; for several tensors."""
        opts = _as_options(dist.ReduceScatterOptions, opts)
        op = _OPS.get(opts.reduceOp.op, "")
        if not (
            self._can_reduce(outputs, op) and self._can_move(inputs) and all(map(self._is_multiple, inputs, outputs))
        ):
            return self._gloo.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        lists = [_cut(long, self.size()) for long in inputs]
        return self._start(lambda memory: _reduce_scatter(memory, outputs, lists, op), outputs, opts)

    def barrier(  # type: ignore[override]
        self, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Wait for all ranks."""
        opts = _as_options(dist.BarrierOptions, opts, timeout)
        if self._memory is None:
            return self._gloo.barrier(opts)
        return self._start(shm_collectives.barrier, [], opts)

    # -- other names of the same ---------------------------------------------------------------------------------

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Copy every rank's tensor into one long tensor on all ranks."""
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Reduce a long tensor over all ranks and leave each rank its part."""
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    # -- the group itself ----------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """Return the name that the group was asked for by; torch asks under this one."""
        return NAME

    def _get_sequence_number_for_group(self) -> int:
        """Return how many calls were made, through the memory or gloo; `SequenceNumber` asks under torch's name."""
        return self._num_started + calls_of_gloo(self)

    def set_timeout(self, timeout: timedelta) -> None:
        """Let calls from now on wait so long for a rank."""
        self._timeout_seconds = timeout.total_seconds()

    def get_group_store(self) -> dist.Store:
        """Return the store of this group."""
        return self._store

    def shutdown(self) -> None:
        """Leave the memory. Calls that nobody waited for have a second to end."""
        if self._pid == os.getpid():
            self._end(_GRACE_SECONDS)
            self._gloo.shutdown()

    def abort(self) -> None:
        """Leave the memory at once; calls under way fail."""
        if self._pid == os.getpid():
            self._end(0.0)
            self._gloo.abort()

    def __del__(self) -> None:
        works = getattr(self, "_works", None)  # none if making the group failed
        if works is not None:
            works.put(None)

    def _end(self, grace_seconds: float) -> None:
        thread, self._thread = self._thread, None
        self._works.put(None)
        if thread is not None:
            thread.join(grace_seconds)
            if thread.is_alive() and self._memory is not None:
                self._memory.interrupt()
                thread.join()
        if self._memory is not None:
            self._memory.close()

    # -- running -------------------------------------------------------------------------------------------------

    def _start(self, run: Callable[[SharedMemory], None], outputs: Any, opts: Any) -> dist.Work:
        """Run a call, or let the thread run it after those that are under way."""
        memory = self._memory
        assert memory is not None
        if self._pid != os.getpid():
            raise RuntimeError(
                f"the process group belongs to process {self._pid}, but a child forked from it made a call: "
                "make a process group in the child"
            )
        seconds = opts.timeout.total_seconds()
        if seconds < 0:  # nothing was said
            seconds = self._timeout_seconds

        def run_in_memory() -> None:
            memory.timeout_seconds = seconds
            run(memory)

        work = SharedMemoryWork(run_in_memory, outputs)
        with self._order:
            self._num_started += 1
            # what a future's callback calls runs in the thread that would have to run it, and may be waited for there
            is_in_callback = threading.current_thread() is self._thread
            if is_in_callback or (not opts.asyncOp and (self._last is None or self._last.is_completed())):
                work.run()
                return work
            if self._thread is None:
                self._thread = threading.Thread(target=run_works, args=(self._works,), name="dure_shm", daemon=True)
                self._thread.start()
            self._works.put(work)
            self._last = work
        return work

    def _can_move(self, *lists: Sequence[Tensor]) -> bool:
        """Whether the bytes of all these tensors can go through the memory."""
        for tensors in lists:
            for tensor in tensors:
                if tensor.device.type != "cpu":
                    raise ValueError(
                        f"a tensor is on {tensor.device}, but {NAME} moves CPU tensors only: make a group with "
                        "another backend for them"
                    )
                if tensor.layout != torch.strided:
                    return False
        return self._memory is not None

    def _can_reduce(self, tensors: Sequence[Tensor], op: str) -> bool:
        known = _REDUCIBLE.get(op, _NONE)
        return self._can_move(tensors) and all(tensor.dtype in known for tensor in tensors)

    def _is_multiple(self, long: Tensor, part: Tensor) -> bool:
        return long.numel() == self.size() * part.numel() and long.dtype == part.dtype and long.is_contiguous()


def create_group(options: Any) -> SharedMemoryGroup:
    """Make a group as `torch.distributed.Backend.register_backend` wants it, with the extended interface."""
    return SharedMemoryGroup(
        options.store, options.group_rank, options.group_size, options.timeout, options.global_ranks_in_group
    )


def _as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _as_options(kind: Any, options: Any, timeout: timedelta | None = None) -> Any:
    """Return options of a kind: as given, or made from the bare reduction that some callers pass."""
    if not isinstance(options, kind):
        reduction, options = options, kind()
        if reduction is not None:
            options.reduceOp = reduction
    if timeout is not None:
        options.timeout = timeout
    return options


def _are_alike(tensors: Sequence[Tensor], like: Tensor) -> bool:
    return all(tensor.numel() == like.numel() and tensor.dtype == like.dtype for tensor in tensors)


def _cut(long: Tensor, num_parts: int) -> list[Tensor]:
    return list(long.data.view(-1).tensor_split(num_parts)) if long.numel() else [long] * num_parts


# The tensors' `data`: gloo does not count what it writes as a change for autograd either.


def _all_reduce(memory: SharedMemory, tensors: Sequence[Tensor], op: str) -> None:
    if len(tensors) == 1:
        data = tensors[0].data
        dense = data.contiguous()
        all_reduce(memory, dense.view(-1), op)
        if dense is not data:
            data.copy_(dense)
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        members = [tensor.data for tensor in tensors if tensor.dtype == dtype]
        dense = torch.cat([member.reshape(-1) for member in members])
        all_reduce(memory, dense, op)
        for member, part in zip(members, dense.split([member.numel() for member in members]), strict=True):
            member.copy_(part.view_as(member))


def _broadcast(memory: SharedMemory, tensors: Sequence[Tensor], root: int) -> None:
    for tensor in tensors:
        data = tensor.data
        dense = data.contiguous()
        shm_collectives.broadcast(memory, dense, root)
        if dense is not data and memory.rank != root:
            data.copy_(dense)


def _all_gather(memory: SharedMemory, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> None:
    for gathered, own in zip(outputs, inputs, strict=True):
        places = [tensor.data for tensor in gathered]
        dense = [place if place.is_contiguous() else torch.empty(place.shape, dtype=place.dtype) for place in places]
        shm_collectives.all_gather(memory, own.data.contiguous(), dense)
        for place, copied in zip(places, dense, strict=True):
            if place is not copied:
                place.copy_(copied)


def _reduce_scatter(
    memory: SharedMemory, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], op: str
) -> None:
    for reduced, shares in zip(outputs, inputs, strict=True):
        place = reduced.data
        dense = place if place.is_contiguous() else torch.empty(place.shape, dtype=place.dtype)
        flat = [share.data.contiguous().view(-1) for share in shares]
        shm_collectives.reduce_scatter(memory, flat, dense.view(-1), op)
        if dense is not place:
            place.copy_(dense)
