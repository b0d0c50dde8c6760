"""Binary-tree all-reduce: rank r's parent is (r - 1) // 2, rank 0 is the root.

Two phases. `reduce`: each rank adds its children's vectors to its own, the lower child's first, and sends the sum to
its parent. `broadcast`: the root's result is sent down the same way.

Both run segment by segment, so that all levels of the tree are busy at once with a long vector.
"""

from torch import Tensor

from dure.comm.algorithms.base import ReduceOp
from dure.comm.algorithms.segments import finish_mean, relay
from dure.comm.algorithms.wire import PointToPoint


def all_reduce(wire: PointToPoint, vector: Tensor, op: ReduceOp) -> None:
    """Reduce a vector over all ranks, in place.

    Communication: N elements to the parent and N to each child, blocking.
    """
    parents, children = parents_of(wire.rank), children_of(wire.rank, wire.world_size)
    wire.mark("reduce", depth_of(wire.world_size - 1) - depth_of(wire.rank))
    relay(wire, vector, sources=children, targets=parents, op=op)
    if not parents:
        finish_mean(vector, op, wire.world_size)
    wire.mark("broadcast", depth_of(wire.rank))
    relay(wire, vector, sources=parents, targets=children, op=None)


def parents_of(rank: int) -> list[int]:
    """Return a list of a rank's parent; empty for the root."""
    return [(rank - 1) // 2] if rank else []


def children_of(rank: int, world_size: int) -> list[int]:
    """Return a rank's children, at most two."""
    return [child for child in (2 * rank + 1, 2 * rank + 2) if child < world_size]


def depth_of(rank: int) -> int:
    """Return the number of levels between a rank and the root."""
    return (rank + 1).bit_length() - 1


def sent_elements(num_elements: int, world_size: int) -> list[int]:
    """Return the elements that each rank sends: its vector to each neighbour in the tree."""
    return [num_elements * (len(parents_of(rank)) + len(children_of(rank, world_size))) for rank in range(world_size)]
