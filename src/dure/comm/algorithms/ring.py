"""Ring all-reduce: each rank communicates with its neighbours only; none can send less (Patarasuk and Yuan 2009).

The vector is cut into one shard per rank. Rank r sends to r + 1 and receives from r - 1.

Phase `scatter-reduce`, P-1 steps: in step s rank r sends shard r - s and adds what it receives to shard r - s - 1,
which it sends in the next step. After the last step rank r, and no other, has the sum over all ranks of shard r + 1.

Phase `all-gather`, P-1 steps: in step s rank r sends the finished shard r + 1 - s and overwrites shard r - s with the
one it receives. All ranks end with the bits that one rank computed.

Long shards are sent in segments, without waiting for whole steps. A segment is passed on to the next rank as soon as it
is added, while those behind it are still being received.
"""

from torch import Tensor

from dure.comm.algorithms.base import ReduceOp
from dure.comm.algorithms.segments import (
    finish_mean,
    in_window,
    reduce_into,
    segment_length,
    shard_bounds,
    window_for,
)
from dure.comm.algorithms.wire import PointToPoint, Transfer
from dure.data.partition import shares


def all_reduce(wire: PointToPoint, vector: Tensor, op: ReduceOp) -> None:
    """Reduce a vector over all ranks, in place.

    Communication: 2 N (P-1)/P elements from each rank, exactly as `sent_elements` says; blocking.
    """
    rank, world_size = wire.rank, wire.world_size
    if world_size == 1:
        return  # the mean of one is itself
    bounds = shard_bounds(vector.numel(), world_size)
    longest = bounds[1]
    length = segment_length(longest, vector.element_size())
    num_segments = -(-longest // length)
    # a segment is sent one step, or `num_segments` transfers, after it was received, and must be finished by then
    window = window_for(num_segments)
    room = wire.scratch(vector, window * length)
    next_rank, previous_rank = (rank + 1) % world_size, (rank - 1) % world_size

    def cut(shard: int, segment: int) -> Tensor:
        start, end = bounds[shard % world_size], bounds[shard % world_size + 1]
        return vector[min(start + segment * length, end) : min(start + (segment + 1) * length, end)]

    def exchange(number: int) -> Transfer:
        step, segment = divmod(number, num_segments)
        if step < world_size - 1:
            wire.mark("scatter-reduce", step)
            outgoing = cut(rank - step, segment)
            first = number % window * length
            incoming = room[first : first + cut(rank - step - 1, segment).numel()]
        else:
            step -= world_size - 1
            wire.mark("all-gather", step)
            outgoing = cut(rank + 1 - step, segment)
            incoming = cut(rank - step, segment)
        return wire.start([(outgoing, next_rank)], [(incoming, previous_rank)])

    def take(number: int) -> None:
        step, segment = divmod(number, num_segments)
        if step >= world_size - 1:
            return  # all-gather: it was received in its final place
        target = cut(rank - step - 1, segment)
        first = number % window * length
        reduce_into(target, room[first : first + target.numel()], op)
        if step == world_size - 2:
            finish_mean(target, op, world_size)

    in_window(2 * (world_size - 1) * num_segments, window, exchange, take)


def sent_elements(num_elements: int, world_size: int) -> list[int]:
    """Return the elements that each rank sends: twice the vector, without the shard that it finishes and the next one.

    Shards differ by one element if `num_elements` is not a multiple of `world_size`, so the results differ by up to
    two.
    """
    sizes = shares(num_elements, world_size)
    return [
        2 * num_elements - sizes[(rank + 1) % world_size] - sizes[(rank + 2) % world_size] for rank in range(world_size)
    ]
