"""One host of a run on several, as the others know it."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Member:
    """One node of a run."""

    node_rank: int
    host: str
    address: str
    """Address of its own, on the way to the leader; for node 0 that of the rendezvous."""
    num_ranks: int
    clock_behind_seconds: float = 0.0
    """Seconds by which its clock is behind the leader's."""

    def __str__(self) -> str:
        """Name it for people."""
        return f"node {self.node_rank} ({self.host}, {self.address})"


class StoppedByPeer(BaseException):
    """Another node was asked to stop while this one had not started its ranks."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__("another node was asked to stop")
