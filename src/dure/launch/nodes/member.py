"""Node of a run, as known to the others."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Member:
    """Node of a run."""

    node_rank: int
    host: str
    address: str
    """Its own address on the route to the leader; for node 0 that of the rendezvous."""
    num_ranks: int
    clock_behind_seconds: float = 0.0
    """Seconds by which its clock is behind the leader's."""

    def __str__(self) -> str:
        """Return the name for messages."""
        return f"node {self.node_rank} ({self.host}, {self.address})"


class StoppedByPeer(BaseException):
    """Stop request on another node, received before this one had started its ranks."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__("another node was asked to stop")
