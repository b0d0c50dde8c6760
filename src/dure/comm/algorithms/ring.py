"""The ring: each rank talks to its neighbours only, and no rank can send less (Patarasuk and Yuan 2009).

The vector is cut into one shard per rank. Rank r sends to r + 1 and receives from r - 1.

Phase `scatter-reduce`, P-1 steps: in step s rank r sends shard r - s and adds what comes in to shard r - s - 1, which
it sends in the next step. After the last step rank r, and no other, has the sum over all ranks of shard r + 1.

Phase `all-gather`, P-1 steps: in step s rank r sends the finished shard r + 1 - s and overwrites shard r - s with the
one that comes in. All ranks end with the bits that one rank computed.

Long shards travel in segments, and the steps are not waited for as a whole: a segment goes on to the next rank as soon
as it was added, while the ones behind it are still coming in.
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

    Communication: 2 N (P-1)/P elements from each rank, to the element as `sent_elements` says; blocking.
    """
    rank, world_size = wire.rank, wire.world_size
    if world_size == 1:
        return  # the mean of one is itself
    bounds = shard_bounds(vector.numel(), world_size)
    longest = bounds[1]
    length = segment_length(longest, vector.element_size())
    num_segments = -(-longest // length)
    # a segment is sent one step, that is `num_segments` transfers, after it came in: it must be finished by then
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
            return  # all-gather: it came in where it belongs
        target = cut(rank - step - 1, segment)
        first = number % window * length
        reduce_into(target, room[first : first + target.numel()], op)
        if step == world_size - 2:
            finish_mean(target, op, world_size)

    in_window(2 * (world_size - 1) * num_segments, window, exchange, take)


def sent_elements(num_elements: int, world_size: int) -> list[int]:
    """Return how many elements each rank sends: twice the vector, without the shard that it finishes and the next one.

    Shards differ by one element where `num_elements` is no multiple of `world_size`, so ranks do by up to two.
    """
    sizes = shares(num_elements, world_size)
    return [
        2 * num_elements - sizes[(rank + 1) % world_size] - sizes[(rank + 2) % world_size] for rank in range(world_size)
    ]
