"""Broadcast, all-gather and reduce-scatter through the memory of one host, in rounds like `algorithms/shm.py`.

Each round has two phases with a barrier between them, `write` and `read` (or `reduce`).
"""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from dure.comm.algorithms.shm import reduce_in_order
from dure.comm.calls import call_number
from dure.comm.rounds import in_rounds
from dure.comm.shared_memory import SharedMemory


def barrier(memory: SharedMemory) -> None:
    """Wait for all ranks."""
    memory.meet(call_number("barrier"))


def broadcast(memory: SharedMemory, tensor: Tensor, root: int) -> None:
    """Overwrite a contiguous tensor with the one of rank `root`.

    Communication: the root writes the tensor once, the others read it; a barrier per round.

    Raises:
        PeerLost: A rank ended, left, or did not come in time.
        RanksDisagree: A rank is in another call.
    """
    num_bytes, address = tensor.numel() * tensor.element_size(), tensor.data_ptr()
    length = memory.slot_bytes

    def write(round_start: int, window: int) -> None:
        if memory.rank == root:
            memory.write(window, 0, address + round_start, min(length, num_bytes - round_start))

    def read(round_start: int, window: int) -> None:
        if memory.rank != root:
            size = min(length, num_bytes - round_start)
            ctypes.memmove(address + round_start, memory.slot(root, window), size)

    in_rounds(memory, num_bytes, length, (write, read), call_number("broadcast", num_bytes, root=root))


def all_gather(memory: SharedMemory, own: Tensor, gathered: Sequence[Tensor]) -> None:
    """Copy every rank's contiguous tensor to all ranks.

    Communication: each rank writes its tensor once; a barrier per round.

    Args:
        memory: Of all ranks.
        own: This rank's.
        gathered: One contiguous tensor of as many bytes per rank; the own one may be `own` itself.

    Raises:
        PeerLost: A rank ended, left, or did not come in time.
        RanksDisagree: A rank is in another call.
    """
    num_bytes, source = own.numel() * own.element_size(), own.data_ptr()
    targets = [tensor.data_ptr() for tensor in gathered]
    length = memory.slot_bytes
    if targets[memory.rank] != source:
        ctypes.memmove(targets[memory.rank], source, num_bytes)

    def write(round_start: int, window: int) -> None:
        memory.write(window, 0, source + round_start, min(length, num_bytes - round_start))

    def read(round_start: int, window: int) -> None:
        size = min(length, num_bytes - round_start)
        for rank, target in enumerate(targets):
            if rank != memory.rank:
                ctypes.memmove(target + round_start, memory.slot(rank, window), size)

    in_rounds(memory, num_bytes, length, (write, read), call_number("all_gather", num_bytes))


def reduce_scatter(memory: SharedMemory, shares: Sequence[Tensor], reduced: Tensor, op: str) -> None:
    """Reduce each rank's share over all ranks, always in the order of the ranks, and leave it there.

    Communication: each rank writes the others' shares once, N (P-1)/P elements; a barrier per round.

    Args:
        memory: Of all ranks.
        shares: One contiguous vector (M,) per rank: what this rank gives to each.
        reduced: (M,) contiguous; may be this rank's own share.
        op: See `algorithms.shm.all_reduce`.

    Raises:
        PeerLost: A rank ended, left, or did not come in time.
        RanksDisagree: A rank is in another call.
    """
    rank, world_size, dtype, size = memory.rank, memory.world_size, reduced.dtype, reduced.element_size()
    num_elements, sources = reduced.numel(), [share.data_ptr() for share in shares]
    room = memory.slot_bytes // world_size
    length = room // size

    def write(start: int, window: int) -> None:
        num_bytes = min(length, num_elements - start) * size
        for other, source in enumerate(sources):
            if other != rank:
                memory.write(window, other * room, source + start * size, num_bytes)

    def reduce(start: int, window: int) -> None:
        num = min(length, num_elements - start)
        terms = [memory.view(source, window, rank * room, num, dtype) for source in range(world_size)]
        # where this rank left out its own share there is room for the sums on the way
        scratch, terms[rank] = terms[rank], shares[rank][start : start + num]
        reduce_in_order(terms, reduced[start : start + num], scratch, op)

    call = call_number("reduce_scatter", num_elements * size, op=op, dtype=dtype)
    if world_size == 1:
        reduced.copy_(shares[0])
    else:
        in_rounds(memory, num_elements, length, (write, reduce), call)
