"""Request to start the ranks of a run."""

import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from dure.launch.hangs.diagnosis import HangVerdict
from dure.launch.hangs.watchdog import HangPolicy
from dure.launch.logs.rank_logs import RankLogs
from dure.launch.nodes.failover import LeaderFailover
from dure.launch.nodes.peers import Nodes
from dure.launch.rounds.restart_policy import RestartPolicy
from dure.launch.worker.child import Output
from dure.process.jobs import Job
from dure.process.round_orders import Restart, RoundOrders


class Listener(Protocol):
    """Listener to events of ranks while they run."""

    def hang(self, verdict: HangVerdict) -> None:
        """Handle a hang, before any action on it."""
        ...

    def print_status(self, text: str) -> None:
        """Print the reason why a stop takes long, or that something still goes on."""
        ...

    def restart(self, restart: Restart) -> None:
        """Handle a restart, before it happens."""
        ...

    def change(self, why: str) -> None:
        """Handle the end of a round for a reason other than a rank's failure."""
        ...


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Request to start the ranks of one host."""

    entry: str
    """Module with `main(job, place) -> exit code` and `before_fork(job)`."""
    job: Job
    nodes: Nodes
    """This host, and the connections to the launchers of the run's others; see `Nodes.alone`."""
    threads: int
    store_prefix: str
    start: str
    """Start method: `auto`, `fork` or `spawn`."""
    output_of: Callable[[int], Output] = lambda rank: Output()
    """Function that returns a rank's output; by default it is shown in the terminal."""
    expendable: Collection[int] = ()
    """Ranks without which the others continue when a signal kills them."""
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    serves_store: bool = False
    """True if a separate process serves the store; otherwise rank 0 does."""
    stop_grace_seconds: float = 2.0
    """Seconds that the other ranks have to end after one followed a signal: its checkpoint is written by then, or there
    was nothing to save.
    """
    grace_seconds: float = 30.0
    """Seconds from a stop signal until ranks that have not ended are killed."""
    saves_snapshots: bool = False
    """True if the snapshots in memory of killed ranks are saved by restarted ranks."""
    end_grace_seconds: float | None = 10.0
    """Seconds that the other ranks have to end after one ended normally; ample if they have met in a barrier before.
    None for no limit.
    """
    most_seconds: float | None = None
    """Seconds after which the ranks of a round are ended, whatever they are doing; None for no limit."""
    hangs: HangPolicy | None = None
    """Limits on the silence of ranks; None disables the detection of hangs."""
    listener: Listener | None = None
    """Listener to events of the ranks; None if there is none."""
    orders: RoundOrders = field(default_factory=RoundOrders)
    """Orders to the ranks, derived from how those of earlier rounds ended."""
    failover: LeaderFailover | None = None
    """Failover for when the leader cannot be reached; None to end the run."""
    logs: RankLogs | None = None
    """Pipes and log pump of the ranks, serviced by the supervisor while they run."""


@dataclass(frozen=True, kw_only=True)
class StoreSocket:
    """Address of the store of a round's ranks."""

    host: str
    port: int
    listener: socket.socket | None
    """Bound socket on which the store is served; None if another host serves it."""
