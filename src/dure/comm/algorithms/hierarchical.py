"""Two-level all-reduce: within a host, then between hosts, because the network between them is the slow part.

The leader of a host is its lowest rank. Three phases. `in hosts: gather`: a host's ranks send their vectors to their
leader, which adds them up. `between hosts`: the leaders all-reduce in a ring. The network carries what one rank per
host would send, 2 N (H-1)/H from each of H hosts, however many ranks a host has. `in hosts: hand back`: the leaders
send the result to their hosts' ranks.
"""

from collections.abc import Sequence

from torch import Tensor

from dure.comm.algorithms import ring, star
from dure.comm.algorithms.base import ReduceOp
from dure.comm.algorithms.segments import finish_mean
from dure.comm.algorithms.wire import PointToPoint


def all_reduce(wire: PointToPoint, vector: Tensor, op: ReduceOp) -> None:
    """Reduce a vector over all ranks, in place.

    Communication: N elements from each rank that is not a leader; N (M-1) + 2 N (H-1)/H from a leader of M ranks on one
    of H hosts; blocking.
    """
    members = hosts_ranks(wire.hosts)
    host = wire.among(next(ranks for ranks in members if wire.rank in ranks), "in hosts: ")
    star.gather(host, vector, op)
    if host.rank == star.SERVER:
        leaders = wire.among([ranks[star.SERVER] for ranks in members], "between hosts: ")
        ring.all_reduce(leaders, vector, "max" if op == "max" else "sum")
        finish_mean(vector, op, wire.world_size)  # each leader divides the same bits by the same number
    star.hand_back(host, vector)


def hosts_ranks(hosts: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each host, in order; the hosts are in order of their leaders."""
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    return list(members.values())


def sent_elements(num_elements: int, world_size: int, hosts: Sequence[int] | None = None) -> list[int]:
    """Return the elements that each rank sends: a leader as a star's server and in the ring, the others their vector.

    Args:
        num_elements: N.
        world_size: P.
        hosts: Host number of each rank; None if all are on one host.
    """
    members = hosts_ranks(hosts if hosts is not None else [0] * world_size)
    counts = [num_elements] * world_size
    for ranks, between in zip(members, ring.sent_elements(num_elements, len(members)), strict=True):
        counts[ranks[star.SERVER]] = num_elements * (len(ranks) - 1) + between
    return counts
