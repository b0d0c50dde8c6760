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
    """Listener to what happens to ranks while they run."""

    def hang(self, verdict: HangVerdict) -> None:
        """Take note of a hang, before anything is done about it."""
        ...

    def say(self, text: str) -> None:
        """Tell people why a stop takes a while."""
        ...

    def restart(self, restart: Restart) -> None:
        """Take note of a restart, before it happens."""
        ...

    def change(self, why: str) -> None:
        """Take note of the reason why a round was ended, other than a rank's failure."""
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
    """`auto`, `fork` or `spawn`."""
    output_of: Callable[[int], Output] = lambda rank: Output()
    """Function that returns a rank's output; that of the default is shown in the terminal."""
    expendable: Collection[int] = ()
    """Ranks without which the others go on when a signal kills them."""
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    serves_store: bool = False
    """True if a separate process serves the store; otherwise rank 0 does."""
    stop_grace_seconds: float = 2.0
    """Seconds that the other ranks have to end after one followed a signal: its checkpoint is written by then, or there
    was nothing to save."""
    grace_seconds: float = 30.0
    """Seconds from a stop signal until ranks that have not ended are killed."""
    saves_snapshots: bool = False
    """True if the snapshots in memory of ranks that had to be killed are saved by ranks that are started once more."""
    end_grace_seconds: float | None = 10.0
    """Seconds that the other ranks have to end after one ended in order; ample if they have met in a barrier before.
    None for no limit."""
    most_seconds: float | None = None
    """Seconds after which the ranks of a round are ended, whatever they are doing; None for no limit."""
    hangs: HangPolicy | None = None
    """Limits on the silence of ranks; None if hangs are not looked for."""
    listener: Listener | None = None
    """Listener to what happens to the ranks; None where that is of no interest."""
    orders: RoundOrders = field(default_factory=RoundOrders)
    """Orders to the ranks that follow from how those of the rounds before ended."""
    way_back: LeaderFailover | None = None
    """Failover for when the leader cannot be reached; None to end the run."""
    logs: RankLogs | None = None
    """Pipes and log pump of the ranks, serviced by the supervisor while they run."""


@dataclass(frozen=True, kw_only=True)
class StoreSocket:
    """Address at which the ranks of a round meet."""

    host: str
    port: int
    listener: socket.socket | None
    """The bound socket on which the store is served; None where another host serves it."""
