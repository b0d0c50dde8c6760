"""Starts the ranks of one host, watches them, and ends them together."""

import importlib
import itertools
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType

from dure.errors import EnvironmentLacks
from dure.launch.examination import examine
from dure.launch.fork_safety import reason_fork_would_fail, reason_not_to_fork
from dure.launch.hang import HangVerdict, explain
from dure.launch.restarts import Restart, Restarts
from dure.launch.store_server import StoreServer
from dure.launch.verdict import STOP_ENDS, WorkerEnd
from dure.launch.watchdog import Watchdog
from dure.launch.workers import KeptMemory, Launch, Worker, start_worker
from dure.stopping import STOP_SIGNALS, heeded_signals

_FAILURE_GRACE_SECONDS = 1.0
"""What the other ranks get after one failed, to end by themselves and leave word why."""
_RESTART_GRACE_SECONDS = 0.1
"""What they get where all are started again anyway and the first to fail has said why."""
_POLL_SECONDS = 0.02
_LOOK_SECONDS = 0.5
"""The longest sleep: a bound on what a missed wake-up could cost."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How all ranks of a job ended."""

    ends: list[WorkerEnd]
    """Empty when a signal came before any rank was started."""
    signal: int | None
    """The first signal that asked the run to stop, if any."""
    refusal: str | None = None
    """Why the ranks were not started once more, where the failure alone does not say it."""
    hang: HangVerdict | None = None
    """Why the supervisor ended ranks that were not getting on."""


class _StoppedBeforeStart(BaseException):
    """A signal came while there was no rank yet."""


def run_workers(launch: Launch) -> Outcome:
    """Start all ranks, wait for all of them, and leave none behind.

    The first rank that fails gives the others a second to end by themselves; then they are killed, unless it is one
    that they can do without. Then all are started again in a new round, as often as `launch.restarts` allows. The
    first stop signal is passed on to all ranks, which checkpoint and end; a second
    one kills them.

    Raises:
        EnvironmentLacks: A fork was asked for where it cannot work, or the system starts no more processes.
    """
    by_fork = _decide_to_fork(launch)
    workers: list[Worker] = []
    restarts = Restarts(launch.restarts)
    memory = KeptMemory(launch)
    hang: HangVerdict | None = None
    with closing(memory), _passing_signals_on(workers) as received:
        try:
            if by_fork:
                # once, before any rank exists: a second and a half of imports that every rank would pay
                importlib.import_module(launch.entry).before_fork(launch.job)
            for round_number in itertools.count():
                hang = _run_round(launch, workers, memory, round_number, by_fork=by_fork)
                ends = [worker.end for worker in workers if worker.end is not None]
                if received or (hang is not None and launch.hangs is not None and launch.hangs.action == "stop"):
                    restart = None
                elif hang is not None:
                    restart = restarts.after_hang(hang)
                else:
                    restart = restarts.after(ends, lambda rank: memory.heartbeats.last(rank).step)
                if restart is None:
                    break
                _end_open_line(launch, workers)
                workers.clear()
                if launch.on_restart is not None:
                    launch.on_restart(restart)
                launch = as_decided(launch, restart, memory)
        except _StoppedBeforeStart:
            pass
        finally:
            _kill(workers)
            _end_open_line(launch, workers)
        return Outcome(
            ends=[w.end for w in workers if w.end is not None],
            signal=received[0] if received else None,
            refusal=restarts.refusal,
            hang=hang,
        )


def as_decided(launch: Launch, restart: Restart, memory: KeptMemory) -> Launch:
    """Return what the next round is to be told."""
    if restart.microbatch_sizes is not None:
        launch = replace(launch, microbatch_size=restart.microbatch_sizes[1])
    if restart.go_back_to is not None:
        return replace(launch, trusted_samples=restart.go_back_to)
    # a rank that has begun a step knows that all have forgotten what was not to be trusted
    has_begun = any(memory.heartbeats.last(rank).step > 0 for rank in range(launch.num_processes))
    return replace(launch, trusted_samples=None) if has_begun else launch


def _run_round(
    launch: Launch, workers: list[Worker], memory: KeptMemory, round_number: int, *, by_fork: bool
) -> HangVerdict | None:
    """Start all ranks once, and return when all have ended; where they had to be ended because they hung, why."""
    memory.heartbeats.forget()
    with _listening_socket() as listener, _store_served(launch, listener, by_fork=by_fork):
        with _signals_held_back():
            for rank in range(launch.num_processes):
                worker = start_worker(launch, rank, listener, memory, round_number=round_number, by_fork=by_fork)
                workers.append(worker)  # one by one: those started must be known if the next cannot be
        listener.close()
        hang = _wait(launch, workers, memory)
        _kill(workers)
    return hang


def _end_open_line(launch: Launch, workers: list[Worker]) -> None:
    """Begin a fresh line in the terminal when rank 0 could not end its live line itself."""
    if any(worker.rank == 0 and worker.end and worker.end.exit_code < 0 for worker in workers):
        _begin_line(launch)


def _begin_line(launch: Launch) -> None:
    has_live_line = sys.stderr.isatty() and launch.outputs[0].descriptors is None
    if has_live_line:
        print(file=sys.stderr)


def _decide_to_fork(launch: Launch) -> bool:
    if launch.start != "fork":
        return launch.start == "auto" and reason_not_to_fork() is None
    reason = reason_fork_would_fail(launch.threads)
    if reason is not None:
        raise EnvironmentLacks(f"start is fork but {reason}: use --start spawn, or auto")
    return True


@contextmanager
def _listening_socket() -> Iterator[socket.socket]:
    """Bind a free port of the loopback interface; the store is served on this very socket, so nobody can take it."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    try:
        yield listener
    finally:
        listener.close()


def _store_served(launch: Launch, listener: socket.socket, *, by_fork: bool) -> AbstractContextManager[object]:
    return closing(StoreServer(listener, by_fork=by_fork)) if launch.serves_store else nullcontext()


@contextmanager
def _passing_signals_on(workers: list[Worker]) -> Iterator[list[int]]:
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if not workers:
            raise _StoppedBeforeStart
        for worker in workers:
            if len(received) == 1:
                worker.send(number)
            else:
                worker.stop_at_once()

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.signal(number, pass_on) for number in heeded_signals()}
    # where children are not waited for (SIG_IGN), nobody would learn how they ended
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield received
    finally:
        for number, handler in before.items():
            # None: a handler that was not set from Python, and cannot be put back from it
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Deliver stop signals only when every worker is known, so that none misses a signal passed on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(launch: Launch, workers: list[Worker], memory: KeptMemory) -> HangVerdict | None:
    """Wait until all have ended; after the first end, only as long as its grace lasts.

    Returns:
        Why they will not end by themselves, if they hang and are not to be waited for.
    """
    watchdog = None if launch.hangs is None else Watchdog(memory.heartbeats, launch.hangs.hang_after)
    deadline: float | None = None
    while True:
        alive = _still_alive(workers)
        if not alive:
            return None
        grace = _grace([worker.end for worker in workers if worker.end is not None], launch)
        if grace is not None:
            deadline = min(deadline or float("inf"), time.monotonic() + grace)
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return None
        _sleep_until_one_ends(alive, _LOOK_SECONDS if left is None else min(_LOOK_SECONDS, left))
        if watchdog is not None and deadline is None:
            hang = _hang(launch, workers, memory, watchdog)
            if hang is not None:
                return hang


def _hang(launch: Launch, workers: list[Worker], memory: KeptMemory, watchdog: Watchdog) -> HangVerdict | None:
    """Tell of ranks that are not getting on; return why, if they are to be ended."""
    seconds = watchdog.silent_seconds([worker.rank for worker in workers if worker.end is None])
    if seconds is None or launch.hangs is None:
        return None
    verdict = explain(examine(workers, memory.heartbeats), seconds)
    if launch.on_hang is not None:
        _begin_line(launch)
        launch.on_hang(verdict)
    acts = launch.hangs.acts(seconds, watchdog.last_threshold, is_certain=verdict.is_certain)
    return verdict if acts else None


def _still_alive(workers: list[Worker]) -> list[Worker]:
    for worker in workers:
        if worker.end is None:
            worker.poll()
    return [worker for worker in workers if worker.end is None]


def _grace(ends: list[WorkerEnd], launch: Launch) -> float | None:
    ends = [end for end in ends if not end.is_tolerated]
    if not ends:
        return None
    failed = [end for end in ends if end.exit_code != 0 and end.exit_code not in STOP_ENDS]
    if failed:
        if not launch.restarts.most:
            return _FAILURE_GRACE_SECONDS
        was_killed = any(end.failure is None and end.exit_code < 0 for end in failed)
        return 0.0 if was_killed else _RESTART_GRACE_SECONDS
    if any(end.exit_code in STOP_ENDS for end in ends):
        return launch.stop_grace_seconds
    return launch.end_grace_seconds


def _sleep_until_one_ends(alive: list[Worker], most_seconds: float) -> None:
    pidfds = [worker.pidfd for worker in alive if worker.pidfd is not None]
    if len(pidfds) < len(alive):
        time.sleep(min(_POLL_SECONDS, most_seconds))
        return
    poll = select.poll()  # select() itself takes no descriptor above 1023
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    poll.poll(most_seconds * 1000)


def _kill(workers: list[Worker]) -> None:
    for worker in workers:
        worker.stop_at_once()
    while _still_alive(workers):
        time.sleep(0.001)
