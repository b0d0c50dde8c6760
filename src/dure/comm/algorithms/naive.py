"""Naive all-reduce: every rank sends its whole vector to every other.

One phase, `exchange`: every rank sends its whole vector to every other and receives theirs. Each rank then adds up all
of them in the order of the ranks, so that all get the same bits.

It sends N (P-1) elements from each rank, P/2 times as many as a ring and as many from each as a star's server. It
serves as an introduction, and as the reference for the others.
"""

from torch import Tensor

from dure.comm.algorithms.base import ReduceOp
from dure.comm.algorithms.segments import finish_mean, in_window, reduce_into, segment_length, window_for
from dure.comm.algorithms.wire import PointToPoint, Transfer


def all_reduce(wire: PointToPoint, vector: Tensor, op: ReduceOp) -> None:
    """Reduce a vector over all ranks, in place.

    Communication: N (P-1) elements from each rank, blocking.
    """
    if not vector.numel():
        return
    others = [rank for rank in range(wire.world_size) if rank != wire.rank]
    length = segment_length(vector.numel(), vector.element_size())
    pieces = vector.split(length)
    window = window_for(len(pieces), len(others))
    room = wire.scratch(vector, window * wire.world_size * length).view(window, wire.world_size, -1)

    def vectors(number: int) -> list[Tensor]:
        """Return every rank's part of a piece: the own one in place, the others where they are received."""
        piece = pieces[number]
        landing = room[number % window, :, : piece.numel()]
        return [piece if rank == wire.rank else landing[rank] for rank in range(wire.world_size)]

    def exchange(number: int) -> Transfer:
        landing = vectors(number)
        return wire.start([(pieces[number], peer) for peer in others], [(landing[peer], peer) for peer in others])

    def add_up(number: int) -> None:
        total, *following = vectors(number)
        for part in following:
            reduce_into(total, part, op)
        if wire.rank != 0:
            pieces[number].copy_(total)

    wire.mark("exchange")
    in_window(len(pieces), window, exchange, add_up)
    finish_mean(vector, op, wire.world_size)


def sent_elements(num_elements: int, world_size: int) -> list[int]:
    """Return the elements that each rank sends: its vector, to all others."""
    return [num_elements * (world_size - 1)] * world_size
