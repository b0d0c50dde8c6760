"""Context that a launcher passes to a worker: its rank's position, descriptors and orders."""

from dataclasses import dataclass

from dure.cluster.rank import RankInfo
from dure.process.round_orders import RoundOrders

_ALONE = RankInfo()
_NO_ORDERS = RoundOrders()


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreAddress:
    """Address of the run's key-value store, and the prefix of this attempt's keys.

    A dead attempt's keys must never be read by the next one, so the prefix carries run and round.
    """

    host: str
    port: int
    prefix: str
    listen_fd: int | None = None
    """Bound, listening socket that the supervisor passes to the rank that serves the store; None on the others."""


CUT = "cut"
"""Key in a rank's report that is no failure: a request that its host send nothing for a number of seconds."""
DEPARTURE = "departure"
"""Key in a rank's report that is no failure: the line at which a script called sys.exit, and its message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Context of a worker, as passed by its launcher."""

    rank: RankInfo = _ALONE
    store: StoreAddress | None = None
    """Address of the store; None for a single process."""
    threads: int
    """CPU threads for this process."""
    interface: str | None = None
    """Network interface to the other hosts of the run; None if there is none."""
    is_supervised: bool
    """True if a supervisor of dure reports for all ranks; otherwise each process reports for itself."""
    report_fd: int | None = None
    """Descriptor of an unnamed file for a failing rank's report to its supervisor."""
    round: int = 0
    """Number of times that the ranks of this run were started before, by the same supervisor."""
    heartbeat_fd: int | None = None
    """Descriptor of the shared memory for heartbeats: `dure.process.heartbeat`."""
    stacks_fd: int | None = None
    """Descriptor for this rank's Python stacks, written on request or at a crash."""
    questions_fd: int | None = None
    """Descriptor of a socket on which the supervisor requests this rank's state."""
    has_live_line: bool = False
    """True if its unfinished line is shown on a terminal and overwritten, although its stderr is a pipe."""
    is_on_several_hosts: bool = False
    """True if the run is on several hosts, or may be in another round."""
    term: int | None = None
    """Term of the leader of a run on several hosts: `dure.records.leader_term`; None if no other node can lead."""
    snapshot_fds: tuple[int, ...] = ()
    """Descriptors of memory that outlives the ranks, one for each rank of this host, for the ranks of the next round.
    """
    orders: RoundOrders = _NO_ORDERS
    """Orders derived from how the ranks of earlier rounds ended."""
