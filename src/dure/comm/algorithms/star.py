"""Star all-reduce: a server gathers and returns the result, like a parameter server.

Two phases. `gather`: every rank sends its vector to rank 0, which adds them up in the order of the ranks. `hand back`:
rank 0 sends the result to each of them.

In total it sends no more than a ring, 2 N (P-1), but rank 0 alone sends N (P-1) of that and receives as much. With P
ranks the server's link takes P/2 times as long as a ring's links (Li et al. 2014, section 1, shard the server for this
reason).
"""

from torch import Tensor

from dure.comm.algorithms.base import ReduceOp
from dure.comm.algorithms.segments import finish_mean, relay
from dure.comm.algorithms.wire import PointToPoint

SERVER = 0


def all_reduce(wire: PointToPoint, vector: Tensor, op: ReduceOp) -> None:
    """Reduce a vector over all ranks, in place.

    Communication: N (P-1) elements from rank 0, N from each other, blocking.
    """
    gather(wire, vector, op)
    if wire.rank == SERVER:
        finish_mean(vector, op, wire.world_size)
    hand_back(wire, vector)


def gather(wire: PointToPoint, vector: Tensor, op: ReduceOp) -> None:
    """Reduce all vectors into the server's; a mean is a sum until `finish_mean`."""
    wire.mark("gather")
    if wire.rank == SERVER:
        relay(wire, vector, sources=range(1, wire.world_size), targets=[], op=op)
    else:
        relay(wire, vector, sources=[], targets=[SERVER], op=op)


def hand_back(wire: PointToPoint, vector: Tensor) -> None:
    """Overwrite all vectors with the server's."""
    wire.mark("hand back")
    if wire.rank == SERVER:
        relay(wire, vector, sources=[], targets=range(1, wire.world_size), op=None)
    else:
        relay(wire, vector, sources=[SERVER], targets=[], op=None)


def sent_elements(num_elements: int, world_size: int) -> list[int]:
    """Return the elements that each rank sends: the server the result to all others, the others their vector."""
    return [num_elements * (world_size - 1)] + [num_elements] * (world_size - 1)
