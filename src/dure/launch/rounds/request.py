"""Request to start the ranks of a run."""

import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dure.launch.hangs.diagnosis import HangVerdict
from dure.launch.hangs.watchdog import HangPolicy
from dure.launch.logs.rank_logs import RankLogs
from dure.launch.nodes.failover import WayBack
from dure.launch.nodes.peers import Nodes
from dure.launch.rounds.restart_policy import Restart, RestartPolicy
from dure.launch.worker.child import Output


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Request to start the ranks of one host."""

    entry: str
    """Module with `main(job, place) -> exit code` and `before_fork(job)`."""
    job: Mapping[str, Any]
    num_processes: int
    """Number of processes on this host."""
    threads: int
    outputs: Sequence[Output]
    """Output of each rank of this host."""
    store_prefix: str
    start: str
    """`auto`, `fork` or `spawn`."""
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
    stopped_by: int | None = None
    """Stop signal after which the ranks only save the snapshots in memory."""
    end_grace_seconds: float | None = 10.0
    """Seconds that the other ranks have to end after one ended in order; ample if they have met in a barrier before.
    None for no limit."""
    most_seconds: float | None = None
    """Seconds after which the ranks of a round are ended, whatever they are doing; None for no limit."""
    hangs: HangPolicy | None = None
    """Limits on the silence of ranks; None if hangs are not looked for."""
    on_hang: Callable[[HangVerdict], None] | None = None
    """Callback that gets each hang, before anything is done about it."""
    on_stopping: Callable[[str], None] | None = None
    """Callback that gets the reason why a stop takes a while."""
    on_restart: Callable[[Restart], None] | None = None
    """Callback that gets each restart, before it happens."""
    microbatch_size: int | None = None
    """Microbatch size for the ranks, in place of the job's; None to keep the job's."""
    trusted_samples: int | None = None
    """Samples seen up to which the run is known to be right, and from which it goes on; None to trust all of it."""
    nodes: Nodes | None = None
    """Connections to the launchers of the run's other hosts; None if there are none."""
    output_of: Callable[[int], Output] | None = None
    """Function that returns a rank's output, if this host's ranks may change from one round to the next."""
    on_change: Callable[[str], None] | None = None
    """Callback that gets the reason why a round was ended, other than a rank's failure."""
    way_back: WayBack | None = None
    """Failover for when the leader cannot be reached; None to end the run."""
    logs: RankLogs | None = None
    """Pipes and log pump of the ranks, serviced by the supervisor while they run."""

    @property
    def first_rank(self) -> int:
        """The first of the ranks that this launcher starts."""
        return 0 if self.nodes is None else self.nodes.first_rank

    @property
    def world_size(self) -> int:
        """Ranks on all hosts."""
        return self.num_processes if self.nodes is None else self.nodes.world_size


@dataclass(frozen=True, kw_only=True)
class StoreSocket:
    """Address at which the ranks of a round meet."""

    host: str
    port: int
    listener: socket.socket | None
    """The bound socket on which the store is served; None where another host serves it."""
