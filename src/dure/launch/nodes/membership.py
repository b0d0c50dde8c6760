"""Present nodes of a run, and their leader."""

from collections.abc import Sequence

from dure.host.devices import interface_of
from dure.launch.nodes.member import Member


class Membership:
    """Nodes of a run that are present, as known to one of them."""

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
        """Set the nodes that have met.

        Args:
            me: This node.
            members: All nodes that are present, including this one.
            own_address: Address on the route to the leader.
            fewest: Minimum number of nodes; the run is elastic if it is less than `most`.
            most: Maximum number of nodes.
            leader: Node rank of the leader.
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
        """Return whether the run continues without some of its nodes."""
        return self.fewest < self.most

    @property
    def is_alone(self) -> bool:
        """Return whether the run is, and will be, on this host only."""
        return self.most == 1

    @property
    def world_size(self) -> int:
        """Number of ranks of the present nodes."""
        return sum(member.num_ranks for member in self.members)

    @property
    def first_rank(self) -> int:
        """First of this node's ranks: the leader's ranks come first, then those of the others in the order of nodes."""
        own = [member.node_rank for member in self.members].index(self.me.node_rank)
        return sum(member.num_ranks for member in self.members[:own])

    @property
    def own_ranks(self) -> range:
        """Ranks of this node."""
        return range(self.first_rank, self.first_rank + self.me.num_ranks)

    @property
    def interface(self) -> str | None:
        """Return the network interface with this node's address, as gloo and NCCL need it."""
        return None if len(self.members) == 1 else interface_of(self.own_address)

    def member(self, node_rank: int) -> Member:
        """Return a present node by its rank."""
        return next(member for member in self.members if member.node_rank == node_rank)

    def take_in(self, members: Sequence[Member]) -> None:
        """Set the nodes of the next round; rank 0, whose store all ranks use, is on the leader."""
        self.members = tuple(sorted(members, key=lambda one: (one.node_rank != self.leader, one.node_rank)))
