"""Hosts of a run, and which of them leads."""

from collections.abc import Sequence

from dure.host.devices import interface_of
from dure.launch.nodes.member import Member


class Membership:
    """The nodes of a run that are there, as one of them knows them."""

    def __init__(
        self,
        me: Member,
        members: Sequence[Member],
        *,
        own_address: str | None = None,
        fewest: int | None = None,
        most: int | None = None,
        leader: int = 0,
    ) -> None:
        """Know who has met.

        Args:
            me: This node.
            members: All that are there, this one too.
            own_address: On the way to the leader.
            fewest: Nodes without which the run does not go on; fewer than `most`: it goes on without some.
            most: Nodes that there may be.
            leader: Its node rank.
        """
        self.me = me
        self.members = tuple(members)
        self.own_address = own_address or me.address
        self.most = most or len(members)
        self.fewest = fewest or self.most
        self.leader = leader

    @property
    def is_leader(self) -> bool:
        """Return whether this node decides for all."""
        return self.me.node_rank == self.leader

    @property
    def is_elastic(self) -> bool:
        """Return whether the run goes on without some of its nodes."""
        return self.fewest < self.most

    @property
    def is_alone(self) -> bool:
        """Return whether the run is on this host only, and will be."""
        return self.most == 1

    @property
    def world_size(self) -> int:
        """Ranks of the nodes that are there."""
        return sum(member.num_ranks for member in self.members)

    @property
    def first_rank(self) -> int:
        """The first of this node's ranks: the leader's come first, and then the others' in the order of nodes."""
        own = [member.node_rank for member in self.members].index(self.me.node_rank)
        return sum(member.num_ranks for member in self.members[:own])

    @property
    def own_ranks(self) -> range:
        """Ranks of this node."""
        return range(self.first_rank, self.first_rank + self.me.num_ranks)

    @property
    def interface(self) -> str | None:
        """Return the network interface that has this node's address, as gloo and NCCL want it named."""
        return None if len(self.members) == 1 else interface_of(self.own_address)

    def member(self, node_rank: int) -> Member:
        """Return a node that is there."""
        return next(member for member in self.members if member.node_rank == node_rank)

    def node_of(self, rank: int) -> Member:
        """Return the node that a rank runs on."""
        for member in self.members:
            if rank < member.num_ranks:
                return member
            rank -= member.num_ranks
        raise IndexError(rank)

    def take_in(self, members: Sequence[Member]) -> None:
        """Let the next round be of these nodes; rank 0, whose store all meet in, is on the leader."""
        self.members = tuple(sorted(members, key=lambda one: (one.node_rank != self.leader, one.node_rank)))
