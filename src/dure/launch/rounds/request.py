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
    """On this host."""
    threads: int
    outputs: Sequence[Output]
    """Per rank."""
    store_prefix: str
    start: str
    """`auto`, `fork` or `spawn`."""
    expendable: Collection[int] = ()
    """Ranks that the others go on without when a signal kills them."""
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    serves_store: bool = False
    """Whether a process of its own serves the store; otherwise rank 0 does."""
    stop_grace_seconds: float = 2.0
    """What the other ranks get after one followed a signal: its checkpoint is written, or there was nothing to save."""
    grace_seconds: float = 30.0
    """Seconds from a stop signal until ranks that have not ended are ended."""
    saves_snapshots: bool = False
    """True if the snapshots in memory of ranks that had to be ended are saved by ranks that are started once more."""
    stopped_by: int | None = None
    """The stop signal after which the ranks only save the snapshots in memory."""
    end_grace_seconds: float | None = 10.0
    """What they get after one ended in order; ample where they have met in a barrier before. None: any time."""
    most_seconds: float | None = None
    """After that time the ranks of a round are ended, whatever they are at; None: any time."""
    hangs: HangPolicy | None = None
    """None: nobody looks whether ranks hang."""
    on_hang: Callable[[HangVerdict], None] | None = None
    """Told of each hang, before anything is done about it."""
    on_stopping: Callable[[str], None] | None = None
    """Callback that gets what a stop waits for, if that takes a while."""
    on_restart: Callable[[Restart], None] | None = None
    """Told of each restart before it happens."""
    microbatch_size: int | None = None
    """What the ranks are told of it, in the place of what the job says."""
    trusted_samples: int | None = None
    """What the ranks are told of it."""
    nodes: Nodes | None = None
    """The run's other hosts, whose launchers have been met."""
    output_of: Callable[[int], Output] | None = None
    """Where a rank's output goes, where the ranks of this host may be others in the next round."""
    on_change: Callable[[str], None] | None = None
    """Told why a round was ended, where that was no failure of a rank."""
    way_back: WayBack | None = None
    """What to do when the node that leads cannot be reached; None: end."""
    logs: RankLogs | None = None
    """What the ranks speak through; it is looked after while they run."""

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
