"""Context that a launcher gives to a worker: its place among the others."""

from dataclasses import dataclass

from dure.cluster.rank import RankInfo

_ALONE = RankInfo()


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAddress:
    """Address of the run's key-value store, and the prefix of this attempt's keys.

    A dead attempt's keys must never be read by the next one, so the prefix carries run and round.
    """

    host: str
    port: int
    prefix: str
    listen_fd: int | None = None
    """On the rank that serves the store: a bound, listening socket handed down by the supervisor."""


CUT = "cut"
"""In a rank's report: it is no failure, but asks that its host fall silent for so many seconds."""
DEPARTURE = "departure"
"""In a rank's report: it is no failure, but where a script left by sys.exit, and with what message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Place of a worker among the others, as its launcher gives it."""

    rank: RankInfo = _ALONE
    store: StoreAddress | None = None
    """None for a process alone."""
    threads: int
    """CPU threads for this process."""
    interface: str | None = None
    """The network interface that leads to the other hosts of the run."""
    is_supervised: bool
    """Whether a supervisor of ours speaks for all ranks; otherwise each process speaks for itself."""
    report_fd: int | None = None
    """Where a rank that fails tells its supervisor why: a descriptor of an unnamed file."""
    round: int = 0
    """How often the ranks of this run were started before, by the same supervisor."""
    heartbeat_fd: int | None = None
    """Memory in which ranks tell where they are: `dure.process.heartbeat`."""
    stacks_fd: int | None = None
    """Where this rank's Python stacks are written when it is asked for them or crashes."""
    questions_fd: int | None = None
    """A socket on which the supervisor asks what this rank is at."""
    has_live_line: bool = False
    """Whether its unfinished line is shown on a terminal, and written over, though its stderr is a pipe."""
    is_on_several_hosts: bool = False
    """Whether the run is, or may be in another round."""
    epoch: int | None = None
    """Of the node that leads a run on several hosts: `dure.records.leader_epoch`; None: nobody else can."""
    snapshot_fds: tuple[int, ...] = ()
    """Of each rank of this host, memory that outlives it: what is written there is there in the next round."""
    microbatch_size: int | None = None
    """Most samples per backward on one device, where ranks ran out of memory with more; None: as the spec says."""
    stopped_by: int | None = None
    """Stop signal that ended a round: the ranks save the snapshots in memory, and end."""
    trusted_samples: int | None = None
    """Samples seen up to where the run is known to be right, if it is not trusted beyond: it goes on from there."""
