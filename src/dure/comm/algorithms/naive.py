"""The naive all-reduce: every rank sends its whole vector to every other.

One phase, `exchange`: every rank sends its whole vector to every other and receives theirs. Then each adds all of
them up for itself, in the order of the ranks, so that all come to the same bits.

It sends N (P-1) elements from each rank, P/2 times as many as a ring and as many from each as a star's server.
It is here to be read first, and to be what the others are compared with.
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
        """Every rank's part of a piece: this rank's own where it is, the others' where they land."""
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
    """Return how many elements each rank sends: its vector, to all others."""
    return [num_elements * (world_size - 1)] * world_size
