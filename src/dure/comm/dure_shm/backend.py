"""Backend `dure_shm` of torch.distributed: the CPU ranks of one host communicate through shared memory.

    import dure.comm
    torch.distributed.init_process_group("cpu:dure_shm")

All collectives use the memory. Messages between two ranks, and the reduction of sparse tensors, use a gloo group that
every group has. A group whose ranks cannot share memory uses it for everything.

Calls run in the order in which they were made. Asynchronous calls run on one thread per group, so that DDP computes
while its gradients are reduced. A blocking call without pending calls runs in the calling thread.

A call with wrong arguments is refused before it begins, and the group continues as if it had not been made. A call that
fails later ends the group: every further call raises that failure.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dure.comm.dure_shm import collectives as shm_collectives
from dure.comm.dure_shm import tensors as shm_tensors
from dure.comm.dure_shm.arguments import (
    check_alike,
    check_contiguous,
    check_dense,
    check_list,
    check_movable,
    check_one,
    check_pairs,
    check_root,
    check_sparse_sum,
    check_splits,
    check_writable,
    reduction,
)
from dure.comm.dure_shm.group import QueuedGroup
from dure.comm.shared_memory.call_number import call_number
from dure.comm.shared_memory.memory import SharedMemory
from dure.torchcompat.collectives import AllgatherOptions


class SharedMemoryGroup(QueuedGroup):
    """Process group over shared memory, for CPU tensors.

    torch calls these methods, from Python and from C++, under the names of its own groups in 2.11 and in 2.13. Methods
    that are not overridden are those of the base class, which uses gloo.
    """

    # -- collectives ---------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Reduce tensors over all ranks, in place."""
        tensors, opts = _as_list(tensors), _as_options(dist.AllreduceOptions, opts, timeout)
        check_writable("all_reduce", tensors)
        if self._memory is None:
            check_dense("all_reduce", tensors)
            return self._gloo.allreduce(tensors, opts)
        if any(tensor.layout != torch.strided for tensor in tensors):
            check_sparse_sum("all_reduce", opts.reduceOp)
            return self._start(lambda memory: self._all_reduce_sparse(memory, tensors, opts), tensors, opts)
        op = reduction("all_reduce", opts.reduceOp, tensors)
        return self._start(lambda memory: shm_tensors.all_reduce(memory, tensors, op), tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce tensors over all ranks, in place."""
        opts = _as_options(dist.AllreduceCoalescedOptions, opts)
        check_writable("all_reduce_coalesced", tensors)
        if self._memory is None:
            check_dense("all_reduce_coalesced", tensors)
            return self._gloo.allreduce_coalesced(tensors, opts)
        op = reduction("all_reduce_coalesced", opts.reduceOp, tensors)
        return self._start(lambda memory: shm_tensors.all_reduce(memory, tensors, op), tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Reduce tensors over all ranks; one rank receives the result."""
        tensors, opts = _as_list(tensors), _as_rooted_options(dist.ReduceOptions, opts, timeout)
        if op is not None:
            opts.reduceOp = op
        root = opts.rootRank
        check_root("reduce", root, self.size())
        check_writable("reduce", tensors)
        if self._memory is None:
            check_dense("reduce", tensors)
            return self._gloo.reduce(tensors, opts)
        name = reduction("reduce", opts.reduceOp, tensors)
        return self._start(lambda memory: shm_tensors.reduce(memory, tensors, name, root), tensors, opts)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Overwrite tensors with those of one rank."""
        tensors, opts = _as_list(tensors), _as_rooted_options(dist.BroadcastOptions, opts, timeout)
        root = opts.rootRank
        check_root("broadcast", root, self.size())
        check_writable("broadcast", tensors)
        if self._memory is None:
            check_dense("broadcast", tensors)
            return self._gloo.broadcast(tensors, opts)
        check_movable("broadcast", tensors)
        return self._start(lambda memory: shm_tensors.broadcast(memory, tensors, root), tensors, opts)

    def allgather(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Copy every rank's tensor into a list on all ranks."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _as_options(AllgatherOptions, opts, timeout)
        check_pairs("all_gather", outputs, inputs)
        for gathered, own in zip(outputs, inputs, strict=True):
            check_list("all_gather", "output", gathered, own, self.size())
            check_writable("all_gather", gathered)
        if self._memory is None:
            return self._gloo.allgather(outputs, inputs, opts)
        check_movable("all_gather", inputs, *outputs)
        return self._start(lambda memory: shm_tensors.all_gather(memory, outputs, inputs), outputs, opts)

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Copy every rank's tensors into lists on all ranks, one list for each rank."""
        for tensors in output_lists:
            check_pairs("all_gather_coalesced", tensors, inputs)
        return self.allgather([list(tensors) for tensors in zip(*output_lists, strict=True)], inputs, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Copy every rank's tensor into one long tensor on all ranks; for several tensors."""
        opts = _as_options(AllgatherOptions, opts)
        check_pairs("all_gather_single", outputs, inputs)
        for output, own in zip(outputs, inputs, strict=True):
            check_alike("all_gather_single", [output], own, times=self.size())
        check_writable("all_gather_single", outputs)
        if self._memory is None:
            return self._gloo.allgather_into_tensor_coalesced(outputs, inputs, opts)
        check_movable("all_gather_single", inputs, outputs)
        return self._start(lambda memory: shm_tensors.all_gather_into(memory, outputs, inputs), outputs, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Copy every rank's tensor into a list on one rank."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs] if outputs else [], [inputs]
        opts = _as_rooted_options(dist.GatherOptions, opts, timeout)
        root, gathered = opts.rootRank, outputs[0] if outputs else []
        check_root("gather", root, self.size())
        check_one("gather", "input", inputs)
        if gathered or self.rank() == root:
            check_list("gather", "output", gathered, inputs[0], self.size())
            check_writable("gather", gathered)
        if self._memory is None:
            return self._gloo.gather(outputs, [inputs[0].contiguous()], opts)
        check_movable("gather", inputs, gathered)
        places = gathered if self.rank() == root else []
        return self._start(lambda memory: shm_tensors.gather(memory, places, inputs[0], root), outputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Copy a list of tensors from one rank, one tensor to each rank."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs] if inputs else []
        opts = _as_rooted_options(dist.ScatterOptions, opts, timeout)
        root, shares = opts.rootRank, inputs[0] if inputs else []
        check_root("scatter", root, self.size())
        check_one("scatter", "output", outputs)
        if shares or self.rank() == root:
            check_list("scatter", "input", shares, outputs[0], self.size())
        check_writable("scatter", outputs)
        if self._memory is None:
            check_contiguous("scatter", outputs)
            return self._gloo.scatter(outputs, inputs, opts)
        check_movable("scatter", outputs, shares)
        given = shares if self.rank() == root else []
        return self._start(lambda memory: shm_tensors.scatter(memory, outputs[0], given, root), outputs, opts)

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Reduce lists of tensors over all ranks; each rank receives one."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        opts = _as_options(dist.ReduceScatterOptions, opts, timeout)
        check_pairs("reduce_scatter", outputs, inputs)
        for output, shares in zip(outputs, inputs, strict=True):
            check_list("reduce_scatter", "input", shares, None, self.size())
            check_alike("reduce_scatter", [output], shares[self.rank()])
        check_writable("reduce_scatter", outputs)
        if self._memory is None:
            check_contiguous("reduce_scatter", outputs)
            return self._gloo.reduce_scatter(outputs, inputs, opts)
        op = reduction("reduce_scatter", opts.reduceOp, outputs, *inputs)
        return self._start(lambda memory: shm_tensors.reduce_scatter(memory, outputs, inputs, op), outputs, opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce long tensors over all ranks; each rank receives its part; for several tensors."""
        opts = _as_options(dist.ReduceScatterOptions, opts)
        check_pairs("reduce_scatter_single", outputs, inputs)
        for output, long in zip(outputs, inputs, strict=True):
            check_alike("reduce_scatter_single", [long], output, times=self.size())
        check_writable("reduce_scatter_single", outputs)
        if self._memory is None:
            check_contiguous("reduce_scatter_single", outputs)
            return self._gloo.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        op = reduction("reduce_scatter_single", opts.reduceOp, outputs, inputs)
        return self._start(lambda memory: shm_tensors.reduce_scatter_from(memory, outputs, inputs, op), outputs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        """Copy a list of tensors from each rank to all ranks, one tensor to each."""
        opts = _as_options(dist.AllToAllOptions, opts)
        check_list("all_to_all", "output", outputs, None, self.size())
        check_list("all_to_all", "input", inputs, None, self.size())
        check_alike("all_to_all", [outputs[self.rank()]], inputs[self.rank()])
        check_writable("all_to_all", outputs)
        if self._memory is None:
            check_contiguous("all_to_all", outputs)
            return self._gloo.alltoall(outputs, [tensor.contiguous() for tensor in inputs], opts)
        check_movable("all_to_all", outputs, inputs)
        return self._start(lambda memory: shm_tensors.all_to_all(memory, outputs, inputs), outputs, opts)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        """Copy rows of one tensor from each rank to all ranks, with the numbers of rows in the splits."""
        opts = _as_options(dist.AllToAllOptions, opts)
        check_splits(output, input, output_splits, input_splits, self.size())
        check_writable("all_to_all_single", [output])
        if self._memory is None:
            check_contiguous("all_to_all_single", [output])
            return self._gloo.alltoall_base(output, input.contiguous(), output_splits, input_splits, opts)
        check_movable("all_to_all_single", [output, input])
        return self._start(
            lambda memory: shm_tensors.all_to_all_of_rows(memory, output, input, output_splits, input_splits),
            [output],
            opts,
        )

    def barrier(  # type: ignore[override]
        self, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Wait for all ranks."""
        opts = _as_options(dist.BarrierOptions, opts, timeout)
        if self._memory is None:
            return self._gloo.barrier(opts)
        return self._start(shm_collectives.barrier, [], opts)

    def _all_reduce_sparse(self, memory: SharedMemory, tensors: list[Tensor], opts: Any) -> None:
        memory.meet(call_number("sparse all_reduce"))  # gloo does not notice ranks in different calls
        self._gloo.allreduce(tensors, opts).wait()

    # -- messages between two ranks ------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """Send a tensor to one rank."""
        self._check_message("send", tensors, peer)
        return self._gloo.send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """Overwrite a tensor with the one that a rank sends."""
        self._check_message("recv", tensors, peer)
        return self._gloo.recv(tensors, peer, tag)

    def _check_message(self, call: str, tensors: Sequence[Tensor], peer: int) -> None:
        if self._memory is not None:
            self._memory.refuse_after_failure()
        check_root(call, peer, self.size())  # gloo would end the process
        check_contiguous(call, tensors)

    # -- aliases -------------------------------------------------------------------------------------------------

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Copy every rank's tensor into one long tensor on all ranks."""
        return self.allgather_into_tensor_coalesced([output], [input], opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Reduce a long tensor over all ranks; each rank receives its part."""
        return self.reduce_scatter_tensor_coalesced([output], [input], opts)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


def create_group(options: Any) -> SharedMemoryGroup:
    """Create a group, as called by `torch.distributed.Backend.register_backend` with the extended interface."""
    return SharedMemoryGroup(
        options.store, options.group_rank, options.group_size, options.timeout, options.global_ranks_in_group
    )


def _as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _as_options(kind: Any, options: Any, timeout: timedelta | None = None) -> Any:
    """Return options of a type, either as given or made from the plain reduction that some callers pass."""
    if not isinstance(options, kind):
        reduction, options = options, kind()
        if reduction is not None:
            options.reduceOp = reduction
    if timeout is not None:
        options.timeout = timeout
    return options


def _as_rooted_options(kind: Any, options: Any, timeout: timedelta | None) -> Any:
    """Return options of a type, either as given or made from the plain rank that some callers pass."""
    root, options = (options, None) if isinstance(options, int) else (None, options)
    options = _as_options(kind, options, timeout)
    if root is not None:
        options.rootRank = root
    return options
