"""Shared-memory all-reduce: ranks of one host reduce through one segment, each its own share, in cache-sized blocks.

The vector goes through the segment in rounds. A round has three phases with a barrier between each two:

Phase `write`: each rank copies what the others will reduce, all but its own share of the round, into its slot.

Phase `reduce`: each rank adds up its own share over all ranks, from rank 0 upwards. It writes the result into its
vector, and into its slot in the place of its own share.

Phase `read`: each rank copies the others' results into its vector.

The segment is small and reused, so that it stays in the caches, and main memory reads and writes each vector once.

If there are two ranks, or the vector is short, each rank writes the whole vector. After one barrier it reduces the
whole for itself, in the same order as all others. It writes no more than with shares, N elements, and reads (P-1) N
instead of 2 (P-1)/P N. That is the same for two ranks, and cheaper than a second barrier for a short vector.

A vector that is itself in shared memory (`SharedMemoryAllReduce.zeros`) does not go through the segment. After a
barrier each rank adds up its own share, and writes the sums into every rank's vector. It does so block by block, while
they are in its caches. A second barrier keeps ranks from using a vector into which another one still writes sums.
"""

import ctypes
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dure.comm.algorithms.base import AllReduce, ReduceOp
from dure.comm.algorithms.over_wire import check_reducible
from dure.comm.algorithms.segments import finish_mean
from dure.comm.shared_memory.call_number import call_number
from dure.comm.shared_memory.memory import SharedMemory, open_common_bytes, open_shared_memory
from dure.comm.shared_memory.rounds import in_rounds
from dure.torchcompat.collectives import group_timeout_seconds

SHARE_BYTES = 512 * 2**10
"""Maximum size of a rank's share of a round, which it works on at a time; see benchmarks/shm.py."""

_BLOCK_BYTES = 2**20
"""Size of the blocks of a vector that is reduced in place. Each block costs 10 us in calls; from 2 MiB on, its sums no
longer fit in the caches."""

WHOLE_BYTES = 512 * 2**10
"""Maximum bytes beyond its own share that every rank reads in order to save one barrier."""

_SEGMENT_BYTES = 12 * 2**20
"""Maximum size of the segment. With many ranks the shares become smaller, so that it stays within the caches."""

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}

_LINE_BYTES = 64


def slot_bytes_for(world_size: int) -> int:
    """Return the size of a rank's slot of the segment in bytes."""
    share = min(SHARE_BYTES, _SEGMENT_BYTES // (3 * world_size * world_size))
    return world_size * max(4096, share // 4096 * 4096)


def all_reduce(memory: SharedMemory, vector: Tensor, op: str, call: int | None = None) -> None:
    """Reduce a contiguous vector over all ranks, in place.

    Communication: writes N elements of each rank into the segment; a barrier per round, and one more with shares;
    blocking.

    Args:
        memory: Memory of all ranks.
        vector: (N,) contiguous, on the CPU, with the same N and dtype on every rank.
        op: `sum`, `mean`, `max`, `min`, `product`, `band`, `bor` or `bxor`.
        call: Number of the call that this is part of; None if it is a call by itself.

    Raises:
        PeerLost: A rank ended, left, or did not arrive in time.
        RanksDisagree: A rank is in another call.
    """
    if memory.world_size == 1:
        return
    num_bytes = vector.numel() * vector.element_size()
    if call is None:
        call = call_number("all_reduce", num_bytes, op=op, dtype=vector.dtype)
    reduce = _reduce_whole if num_bytes * (memory.world_size - 2) <= WHOLE_BYTES else _reduce_shares
    reduce(memory, vector, op, call)


def reduce_in_order(terms: Sequence[Tensor], out: Tensor, scratch: Tensor, op: str) -> None:
    """Combine at least two vectors from the first to the last, always in this order.

    Args:
        terms: (M,) each.
        out: (M,) result; may be one of the terms.
        scratch: (M,) memory that is none of the terms; may be `out`.
        op: See `all_reduce`.
    """
    combine = _COMBINE[op]
    total = terms[0]
    for term in terms[1:-1]:
        total = combine(total, term, out=scratch)
    combine(total, terms[-1], out=out)
    if op == "mean":
        finish_mean(out, "mean", len(terms))


def _reduce_whole(memory: SharedMemory, vector: Tensor, op: str, call: int) -> None:
    own_rank, num_ranks, num_elements, dtype = memory.rank, memory.world_size, vector.numel(), vector.dtype
    size, address = vector.element_size(), vector.data_ptr()
    length = _round_length(num_elements, memory.slot_bytes // size, _LINE_BYTES // size)

    def write(start: int, window: int) -> None:
        memory.write(window, 0, address + start * size, min(length, num_elements - start) * size)

    def reduce(start: int, window: int) -> None:
        num = min(length, num_elements - start)
        own = vector[start : start + num]
        terms = [memory.view(rank, window, 0, num, dtype) for rank in range(num_ranks)]
        if num_ranks == 2:
            terms[own_rank] = own  # in the nearest cache; the only sum may overwrite it
        reduce_in_order(terms, own, own, op)

    in_rounds(memory, num_elements, length, (write, reduce), call)


def _reduce_shares(memory: SharedMemory, vector: Tensor, op: str, call: int) -> None:
    own_rank, num_ranks, num_elements, dtype = memory.rank, memory.world_size, vector.numel(), vector.dtype
    size, address = vector.element_size(), vector.data_ptr()
    length = _round_length(num_elements, memory.slot_bytes // size, _LINE_BYTES // size * num_ranks)
    share = length // num_ranks

    def bounds(start: int, rank: int) -> tuple[int, int]:
        """Return the start and end of a rank's share of a round."""
        end = min(start + length, num_elements)
        return min(start + rank * share, end), min(start + (rank + 1) * share, end)

    def write(start: int, window: int) -> None:
        own, own_end = bounds(start, own_rank)
        end = min(start + length, num_elements)
        memory.write(window, 0, address + start * size, (own - start) * size)
        memory.write(window, (own_end - start) * size, address + own_end * size, (end - own_end) * size)

    def reduce(start: int, window: int) -> None:
        own, own_end = bounds(start, own_rank)
        offset, num = (own - start) * size, own_end - own
        terms = [memory.view(rank, window, offset, num, dtype) for rank in range(num_ranks)]
        scratch, terms[own_rank] = terms[own_rank], vector[own:own_end]
        reduce_in_order(terms, terms[own_rank], scratch, op)
        memory.write(window, offset, address + own * size, num * size)

    def read(start: int, window: int) -> None:
        for rank in range(num_ranks):
            if rank != own_rank:
                first, last = bounds(start, rank)
                source = memory.slot(rank, window) + (first - start) * size
                ctypes.memmove(address + first * size, source, (last - first) * size)

    in_rounds(memory, num_elements, length, (write, reduce, read), call)


def reduce_in_place(memory: SharedMemory, vectors: Sequence[Tensor], op: str, scratch: Tensor) -> None:
    """Reduce vectors in memory that all ranks have mapped, each rank its own share of all of them.

    Communication: two barriers. N elements of each rank are read or written by others: the terms that they add, and its
    share of the sums. Blocking.

    Args:
        memory: Memory of all ranks, for its barrier.
        vectors: (N,) each, contiguous, by rank; all hold the result at the end.
        op: See `all_reduce`.
        scratch: Bytes for one block of intermediate sums.

    Raises:
        PeerLost: A rank ended, left, or did not arrive in time.
        RanksDisagree: A rank is in another call.
    """
    own, num_ranks = vectors[memory.rank], memory.world_size
    num_elements, size = own.numel(), own.element_size()
    multiple = _LINE_BYTES // size
    share = -(-num_elements // (num_ranks * multiple)) * multiple
    first, last = min(memory.rank * share, num_elements), min((memory.rank + 1) * share, num_elements)
    call = call_number("all_reduce", num_elements * size, op=op, dtype=own.dtype)
    others = [vector.data_ptr() for rank, vector in enumerate(vectors) if rank != memory.rank]
    address, block = own.data_ptr(), scratch.numel() // size
    memory.meet(call)
    for begin in range(first, last, block):
        end = min(begin + block, last)
        sums = scratch[: (end - begin) * size].view(own.dtype)
        reduce_in_order([vector[begin:end] for vector in vectors], own[begin:end], sums, op)
        for other in others:
            ctypes.memmove(other + begin * size, address + begin * size, (end - begin) * size)
    memory.written_bytes += num_elements * size
    memory.meet(call)


def _round_length(num_elements: int, longest: int, multiple: int) -> int:
    """Return the elements of a round, in rounds of equal length, because a short last one would waste its barrier.

    Args:
        num_elements: Elements of the vector.
        longest: Maximum elements of a round, a multiple of `multiple`.
        multiple: Factor of the result, so that shares end at cache lines.
    """
    num_rounds = max(1, -(-num_elements // longest))
    return max(1, -(-num_elements // (num_rounds * multiple))) * multiple


class SharedMemoryAllReduce(AllReduce):
    """All-reduce through shared memory, over the CPU ranks of one host."""

    name = "shm"

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, hosts: Sequence[int] | None = None) -> None:
        """Create the segment. Every rank of the group calls this.

        Communication: two all_gather of a few numbers over the group, blocking.

        Args:
            process_group: Group for CPU tensors, used only here; None for the default group.
            hosts: See `open_all_reduce`; ignored, because opening the segment shows whether all are on one host.

        Raises:
            EnvironmentLacks: A rank cannot open it: another host, another container, or not Linux.
        """
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)

        def exchange(numbers: list[int]) -> list[list[int]]:
            gathered = [torch.empty(len(numbers), dtype=torch.int64) for _ in range(self.world_size)]
            dist.all_gather(gathered, torch.tensor(numbers), group=process_group)
            return [tensor.tolist() for tensor in gathered]

        self._exchange = exchange
        self._common: list[Tensor] = []
        """Vectors that all ranks have mapped: (P, N) bytes each."""
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._memory = open_shared_memory(
            exchange,
            rank=self.rank,
            world_size=self.world_size,
            slot_bytes=slot_bytes_for(self.world_size),
            timeout_seconds=group_timeout_seconds(process_group),
            names=dist.get_process_group_ranks(process_group or dist.group.WORLD),
        )

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has written into shared memory for others."""
        return self._memory.written_bytes

    def all_reduce(self, vector: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce a vector over all ranks, in place."""
        check_reducible(vector, op)
        if vector.device.type != "cpu":
            raise ValueError(f"shm reduces CPU tensors only, but the vector is on {vector.device}: take backend")
        # a short vector is faster through the segment, with one barrier instead of two
        is_long = vector.numel() * vector.element_size() > WHOLE_BYTES
        memory, own, vectors = self._memory, vector.detach(), self._everyones(vector) if is_long else None
        if vectors is None:
            memory.make(lambda: all_reduce(memory, own, op))
        else:
            memory.make(lambda: reduce_in_place(memory, vectors, op, self._scratch))

    def zeros(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros in memory that all ranks have mapped, so that nothing is copied into the segment.

        Communication: two all_gather of a few numbers over the group, blocking.
        """
        num_bytes = num_elements * dtype.itemsize
        common = None
        if device.type == "cpu" and self.world_size > 1 and num_bytes:
            common = open_common_bytes(self._exchange, rank=self.rank, world_size=self.world_size, num_bytes=num_bytes)
        if common is None:
            return super().zeros(num_elements, dtype, device)
        self._common.append(common)
        self._scratch = torch.empty(_BLOCK_BYTES, dtype=torch.uint8)
        return common[self.rank, :num_bytes].view(dtype)

    def _everyones(self, vector: Tensor) -> list[Tensor] | None:
        """Return the vectors of all ranks at this one's position; None if it is not in memory that all have mapped."""
        begin, num_bytes = vector.data_ptr(), vector.numel() * vector.element_size()
        for common in self._common:
            offset = begin - common[self.rank].data_ptr()
            if offset >= 0 and offset + num_bytes <= common.shape[1] and num_bytes:
                return [row[offset : offset + num_bytes].view(vector.dtype) for row in common]
        return None

    def sent_bytes_for(self, num_elements: int, element_bytes: int) -> int:
        """Return the bytes of the vector; 0 for a single rank."""
        return sent_elements(num_elements, self.world_size)[self.rank] * element_bytes

    def close(self) -> None:
        """Leave the segment, which is freed when all ranks have left."""
        self._memory.close()
        self._common.clear()


def sent_elements(num_elements: int, world_size: int) -> list[int]:
    """Return the elements that each rank writes for others: all but its own share, then its result; or all at once."""
    return [num_elements if world_size > 1 else 0] * world_size
