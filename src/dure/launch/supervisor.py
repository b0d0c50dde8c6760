"""Starts the ranks of one host, watches them, and ends them together."""

import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from dure.launch.child import run_in_child
from dure.launch.fork_safety import reason_not_to_fork
from dure.launch.verdict import WorkerEnd
from dure.rank import Place, RankInfo, StoreAddress

_GRACE_SECONDS = 1.0
"""What the other ranks get after one failed, to end by themselves and leave word why."""
_POLL_SECONDS = 0.02
_STOP_CODES = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How all ranks of a job ended."""

    ends: list[WorkerEnd]
    signal: int | None
    """The first signal that asked the run to stop, if any."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What to start."""

    entry: str
    """Module with `main(job, place) -> exit code` and `before_fork(job)`."""
    job: Mapping[str, Any]
    num_processes: int
    threads: int
    log_paths: Sequence[Path | None]
    """Per rank; None keeps the terminal."""
    store_prefix: str
    start: str
    """`auto`, `fork` or `spawn`."""


@dataclass
class _Worker:
    rank: int
    pid: int
    process: "subprocess.Popen[bytes] | None" = None
    """Of a spawned worker; a forked one has none."""
    pidfd: int | None = None
    end: WorkerEnd | None = None
    was_stopped: bool = False

    def poll(self) -> None:
        """Take note of the end, if it has ended."""
        if self.process is not None:
            code = self.process.poll()
        else:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            code = None if pid == 0 else os.waitstatus_to_exitcode(status)
        if code is not None:
            self.end = WorkerEnd(rank=self.rank, exit_code=code, time=time.time(), was_stopped=self.was_stopped)
            if self.pidfd is not None:
                os.close(self.pidfd)
                self.pidfd = None

    def send(self, number: int) -> None:
        """Send a signal, unless it is gone."""
        if self.end is None:
            os.kill(self.pid, number)


def run_workers(launch: Launch) -> Outcome:
    """Start all ranks, wait for all of them, and leave none behind.

    The first rank that fails gives the others a second to end by themselves; then they are killed. The first SIGINT or
    SIGTERM is passed on to all ranks, which checkpoint and end; a second one kills them.
    """
    can_fork = launch.start == "fork" or (launch.start == "auto" and reason_not_to_fork() is None)
    if can_fork:
        # once, before any rank exists: a second and a half of imports that every rank would pay
        module = importlib.import_module(launch.entry)
        module.before_fork(launch.job)
    workers: list[_Worker] = []
    with _listening_socket() as listener, _passing_signals_on(workers) as received:
        try:
            with _signals_held_back():
                for rank in range(launch.num_processes):
                    place = _place(launch, rank, listener)
                    log = launch.log_paths[rank]
                    workers.append(
                        _fork(launch, place, log, listener) if can_fork else _spawn(launch, place, log, listener)
                    )
            listener.close()
            _wait(workers)
        finally:
            _kill(workers)
        return Outcome(ends=[w.end for w in workers if w.end is not None], signal=received[0] if received else None)


def _place(launch: Launch, rank: int, listener: socket.socket) -> Place:
    host, port = listener.getsockname()
    fd = listener.fileno() if rank == 0 else None
    return Place(
        rank=RankInfo(
            rank=rank, local_rank=rank, world_size=launch.num_processes, local_world_size=launch.num_processes
        ),
        store=StoreAddress(host=host, port=port, prefix=launch.store_prefix, listen_fd=fd),
        threads=launch.threads,
        is_supervised=True,
    )


@contextmanager
def _listening_socket() -> Iterator[socket.socket]:
    """Bind a free port of the loopback interface; the store is served on this very socket, so nobody can take it."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    try:
        yield listener
    finally:
        listener.close()


def _fork(launch: Launch, place: Place, log: Path | None, listener: socket.socket) -> _Worker:
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return _Worker(place.rank.rank, pid, pidfd=_pidfd(pid))
    for number in (signal.SIGINT, signal.SIGTERM):
        # a forked copy of the supervisor's handler would pass signals on to the other ranks
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    if place.rank.rank == 0:
        listener.detach()
    else:
        listener.close()
    run = importlib.import_module(launch.entry).main
    run_in_child(lambda: run(launch.job, place), place, log, parent)
    raise AssertionError("a child does not return")


def _spawn(launch: Launch, place: Place, log: Path | None, listener: socket.socket) -> _Worker:
    told = {
        "entry": launch.entry,
        "job": dict(launch.job),
        "place": asdict(place),
        "log": None if log is None else str(log),
        "parent_pid": os.getpid(),
    }
    fds = [listener.fileno()] if place.rank.rank == 0 else []
    command = [sys.executable, "-m", "dure.launch.spawned", json.dumps(told)]
    process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
    return _Worker(place.rank.rank, process.pid, process, _pidfd(process.pid))


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


@contextmanager
def _passing_signals_on(workers: list[_Worker]) -> Iterator[list[int]]:
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for worker in workers:
            worker.send(number if len(received) == 1 else signal.SIGKILL)

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Deliver SIGINT and SIGTERM only when every worker is known, so that none misses a signal passed on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(workers: list[_Worker]) -> None:
    """Wait until all have ended; after the first failure, only as long as the grace lasts."""
    deadline: float | None = None
    while True:
        for worker in workers:
            if worker.end is None:
                worker.poll()
        alive = [worker for worker in workers if worker.end is None]
        if not alive:
            return
        has_failed = any(w.end is not None and w.end.exit_code not in _STOP_CODES for w in workers)
        if has_failed and deadline is None:
            deadline = time.monotonic() + _GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            return
        _sleep_until_one_ends(alive, None if deadline is None else deadline - time.monotonic())


def _sleep_until_one_ends(alive: list[_Worker], most_seconds: float | None) -> None:
    pidfds = [worker.pidfd for worker in alive if worker.pidfd is not None]
    if len(pidfds) < len(alive):
        time.sleep(_POLL_SECONDS)
        return
    select.select(pidfds, [], [], 0.5 if most_seconds is None else max(0.0, min(0.5, most_seconds)))


def _kill(workers: list[_Worker]) -> None:
    for worker in workers:
        if worker.end is None:
            worker.was_stopped = True
            worker.send(signal.SIGKILL)
    for worker in workers:
        while worker.end is None:
            worker.poll()
            time.sleep(0.001)
