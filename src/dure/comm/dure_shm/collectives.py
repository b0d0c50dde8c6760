"""Broadcast, gather, scatter and similar collectives through one host's memory, in rounds as in `algorithms/shm.py`.

Each round has two phases with a barrier between them, `write` and `read` (or `reduce`).
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from dure.comm.algorithms.shm import reduce_in_order
from dure.comm.shared_memory.call_number import call_number
from dure.comm.shared_memory.memory import SharedMemory
from dure.comm.shared_memory.rounds import in_rounds
from dure.errors import RanksDisagree


def barrier(memory: SharedMemory) -> None:
    """Wait for all ranks."""
    memory.meet(call_number("barrier"))


def broadcast(memory: SharedMemory, tensor: Tensor, root: int) -> None:
    """Overwrite a contiguous tensor with the one of rank `root`.

    Communication: the root writes the tensor once, the others read it; a barrier per round.

    Raises:
        PeerLost: A rank ended, left, or did not arrive in time.
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


def all_gather(memory: SharedMemory, own: Tensor, gathered: Sequence[Tensor], call: int | None = None) -> None:
    """Copy every rank's contiguous tensor to all ranks, or to those with outputs for them.

    Communication: each rank writes its tensor once; a barrier per round.

    Args:
        memory: Memory of all ranks.
        own: Tensor of this rank.
        gathered: For each rank, a contiguous output tensor of as many bytes, where this rank's may be `own` itself; or
            empty.
        call: Number of the call that this is part of; None if it is a call by itself.

    Raises:
        PeerLost: A rank ended, left, or did not arrive in time.
        RanksDisagree: A rank is in another call.
    """
    num_bytes, source = own.numel() * own.element_size(), own.data_ptr()
    targets = [tensor.data_ptr() for tensor in gathered]
    length = memory.slot_bytes
    if targets and targets[memory.rank] != source:
        ctypes.memmove(targets[memory.rank], source, num_bytes)

    def write(round_start: int, window: int) -> None:
        memory.write(window, 0, source + round_start, min(length, num_bytes - round_start))

    def read(round_start: int, window: int) -> None:
        size = min(length, num_bytes - round_start)
        for rank, target in enumerate(targets):
            if rank != memory.rank:
                ctypes.memmove(target + round_start, memory.slot(rank, window), size)

    call = call_number("all_gather", num_bytes) if call is None else call
    in_rounds(memory, num_bytes, length, (write, read), call)


def gather(memory: SharedMemory, own: Tensor, gathered: Sequence[Tensor], root: int) -> None:
    """Copy every rank's contiguous tensor to rank `root`, the only one with outputs; see `all_gather`."""
    all_gather(memory, own, gathered, call_number("gather", own.numel() * own.element_size(), root=root))


def scatter(memory: SharedMemory, shares: Sequence[Tensor], received: Tensor, root: int) -> None:
    """Copy one contiguous tensor of rank `root` to each rank.

    Communication: the root writes the others' tensors once, each of them reads its own; a barrier per round.

    Args:
        memory: Memory of all ranks.
        shares: One contiguous tensor per rank on the root; empty elsewhere.
        received: Contiguous output of as many bytes; may be this rank's own share.
        root: Rank that has the tensors.

    Raises:
        PeerLost: A rank ended, left, or did not arrive in time.
        RanksDisagree: A rank is in another call.
    """
    num_bytes, target = received.numel() * received.element_size(), received.data_ptr()
    sources, length = [share.data_ptr() for share in shares], memory.slot_bytes // memory.world_size
    if sources and sources[root] != target:
        ctypes.memmove(target, sources[root], num_bytes)

    def write(start: int, window: int) -> None:
        for rank, source in enumerate(sources):
            if rank != root:
                memory.write(window, rank * length, source + start, min(length, num_bytes - start))

    def read(start: int, window: int) -> None:
        if memory.rank != root:
            source = memory.slot(root, window) + memory.rank * length
            ctypes.memmove(target + start, source, min(length, num_bytes - start))

    in_rounds(memory, num_bytes, length, (write, read), call_number("scatter", num_bytes, root=root))


def all_to_all(memory: SharedMemory, shares: Sequence[Tensor], received: Sequence[Tensor]) -> None:
    """Copy a contiguous tensor of any length from every rank to every rank.

    Communication: the lengths of all tensors; then each rank writes the others' tensors once; a barrier per round.

    Args:
        memory: Memory of all ranks.
        shares: Tensors that this rank sends to each rank.
        received: Outputs of as many bytes as each rank sends to this one; they share no memory with `shares`.

    Raises:
        PeerLost: A rank ended, left, or did not arrive in time.
        RanksDisagree: A rank is in another call, or expects another number of bytes than is sent.
    """
    rank, world_size = memory.rank, memory.world_size
    call = call_number("all_to_all")
    lengths = _all_lengths(memory, shares, received, call)
    sources, targets = [share.data_ptr() for share in shares], [place.data_ptr() for place in received]
    ctypes.memmove(targets[rank], sources[rank], lengths[rank][rank])
    room = memory.slot_bytes // world_size
    longest = max((lengths[a][b] for a in range(world_size) for b in range(world_size) if a != b), default=0)

    def write(start: int, window: int) -> None:
        for other, source in enumerate(sources):
            if other != rank and start < lengths[rank][other]:
                memory.write(window, other * room, source + start, min(room, lengths[rank][other] - start))

    def read(start: int, window: int) -> None:
        for other, target in enumerate(targets):
            if other != rank and start < lengths[other][rank]:
                source = memory.slot(other, window) + rank * room
                ctypes.memmove(target + start, source, min(room, lengths[other][rank] - start))

    in_rounds(memory, longest, room, (write, read), call)


def _all_lengths(
    memory: SharedMemory, shares: Sequence[Tensor], received: Sequence[Tensor], call: int
) -> list[list[int]]:
    """Return the bytes that each rank sends to each; raise an error on all ranks if two of them disagree."""
    num_ranks = memory.world_size
    own = torch.tensor([tensor.numel() * tensor.element_size() for tensor in (*shares, *received)])
    by_rank = [torch.empty_like(own) for _ in range(num_ranks)]
    all_gather(memory, own, by_rank, call)
    given, wanted = zip(*((one.tolist()[:num_ranks], one.tolist()[num_ranks:]) for one in by_rank), strict=True)
    for giver in range(num_ranks):
        for taker in range(num_ranks):
            if given[giver][taker] != wanted[taker][giver]:
                raise RanksDisagree(
                    f"rank {giver} gives {given[giver][taker]} bytes to rank {taker} of the group in all_to_all, which "
                    f"expects {wanted[taker][giver]}: the input splits of each rank must be the output splits of the "
                    "others"
                )
    return list(given)


def reduce_scatter(memory: SharedMemory, shares: Sequence[Tensor], reduced: Tensor, op: str) -> None:
    """Reduce each rank's share over all ranks, always in the order of the ranks; each rank receives its own.

    Communication: each rank writes the others' shares once, N (P-1)/P elements; a barrier per round.

    Args:
        memory: Memory of all ranks.
        shares: Contiguous vectors (M,) that this rank contributes to each rank's share.
        reduced: (M,) contiguous output; may be this rank's own share.
        op: See `algorithms.shm.all_reduce`.

    Raises:
        PeerLost: A rank ended, left, or did not arrive in time.
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
        # this rank's own share is not in its slot, which leaves room for intermediate sums
        scratch, terms[rank] = terms[rank], shares[rank][start : start + num]
        reduce_in_order(terms, reduced[start : start + num], scratch, op)

    call = call_number("reduce_scatter", num_elements * size, op=op, dtype=dtype)
    if world_size == 1:
        reduced.copy_(shares[0])
    else:
        in_rounds(memory, num_elements, length, (write, reduce), call)
