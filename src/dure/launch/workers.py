"""Worker processes as their supervisor has them: started by fork or by spawn, polled, signalled."""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dure.documents import DocumentInvalid, parse_json
from dure.errors import EnvironmentLacks
from dure.heartbeat import Heartbeats
from dure.launch.child import Output, run_in_child
from dure.launch.examination import crash_frames, is_stopped
from dure.launch.leftovers import mark_of, started_at
from dure.launch.questions import Questions
from dure.launch.rank_logs import RankLogs
from dure.launch.restarts import Restart, RestartPolicy
from dure.launch.verdict import STOP_ENDS, WorkerEnd
from dure.launch.watchdog import HangPolicy
from dure.oom_kills import OomWatch
from dure.place import CUT, DEPARTURE, Place, StoreAddress
from dure.rank import RankInfo

if TYPE_CHECKING:
    from dure.launch.hang import HangVerdict
    from dure.launch.nodes import Nodes
    from dure.launch.way_back import WayBack

_REPORT_LIMIT_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What to start."""

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
    on_hang: Callable[["HangVerdict"], None] | None = None
    """Told of each hang, before anything is done about it."""
    on_stopping: Callable[[str], None] | None = None
    """Callback that gets what a stop waits for, if that takes a while."""
    on_restart: Callable[[Restart], None] | None = None
    """Told of each restart before it happens."""
    microbatch_size: int | None = None
    """What the ranks are told of it, in the place of what the job says."""
    trusted_samples: int | None = None
    """What the ranks are told of it."""
    nodes: "Nodes | None" = None
    """The run's other hosts, whose launchers have been met."""
    output_of: Callable[[int], Output] | None = None
    """Where a rank's output goes, where the ranks of this host may be others in the next round."""
    on_change: Callable[[str], None] | None = None
    """Told why a round was ended, where that was no failure of a rank."""
    way_back: "WayBack | None" = None
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


@dataclass(eq=False)
class Worker:
    """One rank's process."""

    rank: int
    pid: int
    report_fd: int
    """An unnamed file in which a rank that fails says why: it works on a full disk too."""
    stacks_fd: int
    """An unnamed file in which its Python stacks are written, when it is asked for them or crashes."""
    questions: Questions
    """Channel on which the rank can be asked where it is."""
    process: "subprocess.Popen[bytes] | None" = None
    """Of a spawned worker; a forked one has none."""
    pidfd: int | None = None
    is_expendable: bool = False
    has_begun: Callable[[], bool] = lambda: True
    """Whether it has trained: before that all ranks need each other."""
    end: WorkerEnd | None = None
    keeps_terminal: bool = False
    """True if its streams are those of the supervisor."""
    was_stopped: bool = False
    was_held: bool = False

    def __post_init__(self) -> None:
        self.oom = OomWatch(self.pid)
        self.mark, self.started_at = mark_of(self.stacks_fd), started_at(self.pid)

    def poll(self) -> None:
        """Take note of the end, if it has ended."""
        if self.process is not None:
            code = self.process.poll()
        else:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            code = None if pid == 0 else os.waitstatus_to_exitcode(status)
        if code is None:
            self.oom.look()
        else:
            report = _read_report(self.report_fd) or {}
            departure = report.get(DEPARTURE)
            failure = report if report and departure is None else None
            # an exception is the task's, and would come again on another rank; what kills a process is the machine's
            was_killed = code < 0 and code not in STOP_ENDS and not self.was_stopped and failure is None
            is_out_of_memory = self.oom.was_killed() if was_killed and code == -signal.SIGKILL else None
            self.end = WorkerEnd(
                rank=self.rank,
                exit_code=code,
                time=time.time(),
                was_stopped=self.was_stopped,
                was_held=self.was_held,
                failure=failure,
                departure=departure,
                is_tolerated=self.is_expendable and was_killed and self.has_begun(),
                is_out_of_memory=is_out_of_memory,
                memory_limit_bytes=self.oom.limit_bytes() if is_out_of_memory else None,
                crash=crash_frames(self.stacks_fd) if code < 0 and not self.was_stopped else (),
            )
            self._close()

    def asked_cut(self) -> float | None:
        """Return for how many seconds it asks that its host fall silent, once."""
        if self.end is not None or not os.fstat(self.report_fd).st_size:
            return None
        seconds = (_read_report(self.report_fd) or {}).get(CUT)
        if seconds is not None:
            os.ftruncate(self.report_fd, 0)
        return None if seconds is None else float(seconds)

    def send(self, number: int) -> None:
        """Send a signal, unless it is gone."""
        if self.end is None:
            os.kill(self.pid, number)

    def stop_at_once(self) -> None:
        """Kill it, and remember that this end is our doing."""
        if self.end is None:
            self.was_stopped, self.was_held = True, is_stopped(self.pid)
            self.send(signal.SIGKILL)

    def _close(self) -> None:
        os.close(self.report_fd)
        os.close(self.stacks_fd)
        self.questions.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


class KeptMemory:
    """Memory of a run that outlives its ranks: the supervisor holds it, in no file system."""

    def __init__(self, launch: Launch) -> None:
        self.heartbeat_fd = unnamed_file("dure-heartbeats")
        most_ranks = launch.world_size if launch.nodes is None else launch.nodes.most * launch.num_processes
        self.heartbeats = Heartbeats(self.heartbeat_fd, max(most_ranks, launch.world_size))
        num_snapshots = launch.num_processes if launch.restarts.most else 0
        self.snapshot_fds = tuple(unnamed_file(f"dure-snapshot{rank}") for rank in range(num_snapshots))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What a process must inherit to use it."""
        return self.heartbeat_fd, *self.snapshot_fds

    def has_begun(self, num_ranks: int) -> bool:
        """Return whether a rank has begun a step after the first one."""
        return any(self.heartbeats.last(rank).step > 0 for rank in range(num_ranks))

    def has_snapshots(self) -> bool:
        """Return whether ranks have left snapshots."""
        return any(os.fstat(descriptor).st_size for descriptor in self.snapshot_fds)

    def forget(self) -> None:
        """Forget all snapshots: others have gone on meanwhile, from another one."""
        for descriptor in self.snapshot_fds:
            os.ftruncate(descriptor, 0)

    def close(self) -> None:
        """Give it back."""
        for descriptor in self.descriptors:
            os.close(descriptor)


@dataclass(frozen=True, kw_only=True)
class StoreSocket:
    """Where the ranks of a round meet."""

    host: str
    port: int
    listener: socket.socket | None
    """The bound socket on which the store is served; None where another host serves it."""


def start_worker(
    launch: Launch, rank: int, store: StoreSocket, memory: KeptMemory, *, round_number: int, by_fork: bool
) -> Worker:
    """Start one rank; stop signals must be blocked meanwhile, and the new process unblocks them when it is ready.

    Args:
        launch: What to start.
        rank: Which one.
        store: Where the store is, which rank 0 serves unless another process does.
        memory: What ranks leave to those of the next round.
        round_number: How often the ranks were started before.
        by_fork: Fork; otherwise start a fresh interpreter.

    Raises:
        EnvironmentLacks: The system starts no more processes.
    """
    report_fd, stacks_fd = unnamed_file(f"dure-rank{rank}"), unnamed_file(f"dure-stacks{rank}")
    questions, answers = socket.socketpair()
    output = launch.outputs[rank - launch.first_rank]
    place = replace(
        _place(launch, rank, store, report_fd, round_number),
        heartbeat_fd=memory.heartbeat_fd,
        snapshot_fds=memory.snapshot_fds,
        stacks_fd=stacks_fd,
        questions_fd=answers.fileno(),
        has_live_line=output.has_live_line,
    )
    try:
        start = _fork if by_fork else _spawn
        pid, process = start(launch, place, output, store.listener)
    except OSError as error:
        os.close(report_fd)
        os.close(stacks_fd)
        questions.close()
        raise EnvironmentLacks(
            f"rank {rank} of {launch.world_size} could not be started: {error.strerror}; use a smaller --nproc, or "
            "raise the limit on processes (ulimit -u)"
        ) from error
    finally:
        answers.close()
    return Worker(
        rank=rank,
        pid=pid,
        report_fd=report_fd,
        stacks_fd=stacks_fd,
        questions=Questions(questions),
        process=process,
        pidfd=_pidfd(pid),
        is_expendable=rank in launch.expendable,
        keeps_terminal=output.is_terminal,
        has_begun=lambda: memory.heartbeats.last(rank).step >= 0,
    )


def _place(launch: Launch, rank: int, store: StoreSocket, report_fd: int, round_number: int) -> Place:
    serves = rank == 0 and not launch.serves_store and store.listener is not None
    return Place(
        rank=RankInfo(
            rank=rank,
            local_rank=rank - launch.first_rank,
            node_rank=0 if launch.nodes is None else launch.nodes.me.node_rank,
            world_size=launch.world_size,
            local_world_size=launch.num_processes,
        ),
        store=StoreAddress(
            host=store.host,
            port=store.port,
            prefix=f"{launch.store_prefix}/{round_number}",
            listen_fd=store.listener.fileno() if serves and store.listener is not None else None,
        ),
        interface=None if launch.nodes is None else launch.nodes.interface,
        is_on_several_hosts=launch.nodes is not None,
        epoch=None if launch.nodes is None or launch.nodes.lease is None else launch.nodes.lease.epoch,
        threads=launch.threads,
        is_supervised=True,
        report_fd=report_fd,
        round=round_number,
        microbatch_size=launch.microbatch_size,
        trusted_samples=launch.trusted_samples,
        stopped_by=launch.stopped_by,
    )


_Started = tuple[int, "subprocess.Popen[bytes] | None"]
"""The process, and what Python knows of one that was spawned."""


def _fork(launch: Launch, place: Place, output: Output, listener: socket.socket | None) -> _Started:
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, NumPy's too, which do survive; `reason_not_to_fork` has looked closer
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid, None
    if listener is not None and place.store is not None and place.store.listen_fd is not None:
        listener.detach()
    elif listener is not None:
        listener.close()

    def entry() -> int:
        if launch.logs is not None:
            launch.logs.leave()
        return int(importlib.import_module(launch.entry).main(launch.job, place))

    run_in_child(entry, place, output, parent)
    raise AssertionError("a child does not return")


def _spawn(launch: Launch, place: Place, output: Output, listener: socket.socket | None) -> _Started:
    told = {
        "entry": launch.entry,
        "job": dict(launch.job),
        "place": asdict(place),
        "output": asdict(output),
        "parent_pid": os.getpid(),
    }
    own = place.report_fd, place.stacks_fd, place.questions_fd, place.heartbeat_fd, *place.snapshot_fds
    fds = [fd for fd in (*own, *(output.descriptors or ())) if fd is not None]
    if place.store is not None and place.store.listen_fd is not None:
        fds.append(place.store.listen_fd)
    # -W, -X, -O and the like, as multiprocessing hands them on
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-m", "dure.launch.spawned", json.dumps(told)]
    process = subprocess.Popen(command, pass_fds=fds, stdin=None if output.is_terminal else subprocess.DEVNULL)
    return process.pid, process


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def unnamed_file(name: str) -> int:
    """Open a file that has no name in any file system, in memory where there is that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _read_report(descriptor: int) -> dict[str, Any] | None:
    data = os.pread(descriptor, _REPORT_LIMIT_BYTES, 0)
    try:
        report = parse_json(data) if data else None
    except DocumentInvalid:  # it was killed while it wrote
        return None
    return report if isinstance(report, dict) else None
