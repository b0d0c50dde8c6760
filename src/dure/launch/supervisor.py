"""Starts the ranks of one host, watches them, and ends them together."""

import importlib
import itertools
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType

from dure.errors import EnvironmentLacks
from dure.launch.examination import examine
from dure.launch.fork_safety import reason_fork_would_fail, reason_not_to_fork
from dure.launch.hang import HangVerdict, explain
from dure.launch.joint_look import JointLook
from dure.launch.nodes import Nodes, StoppedByPeer
from dure.launch.restarts import Restart, Restarts
from dure.launch.store_server import StoreServer
from dure.launch.verdict import STOP_ENDS, WorkerEnd
from dure.launch.watchdog import Watchdog
from dure.launch.workers import KeptMemory, Launch, StoreSocket, Worker, start_worker
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
    """How all ranks of a job ended, on all nodes."""

    ends: list[WorkerEnd]
    """Empty when a signal came before any rank was started."""
    signal: int | None
    """The first signal that asked the run to stop, if any."""
    refusal: str | None = None
    """Why the ranks were not started once more, where the failure alone does not say it."""
    hang: HangVerdict | None = None
    """Why the supervisor ended ranks that were not getting on."""
    lost: str | None = None
    """The sentence about a node that went away, or did not go on."""


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
                hang = _run_round(launch, workers, memory, round_number, received, by_fork=by_fork)
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
            if launch.nodes is not None:
                launch.nodes.exchange_signals(received)
        except StoppedByPeer as stop:
            received.append(stop.number)
        finally:
            _kill(workers)
            _end_open_line(launch, workers)
        ends = [worker.end for worker in workers if worker.end is not None]
        if launch.nodes is not None and ends:
            launch.nodes.tell_ending(_ending(ends) or "ended")
            look = _joint_look(launch, workers, memory, None)
            ends = launch.nodes.finish(
                [replace(end, node=str(launch.nodes.me)) for end in ends],
                lambda: _tell_and_heed(launch, received, look),
            )
        return Outcome(
            ends=ends,
            signal=received[0] if received else None,
            refusal=restarts.refusal,
            hang=hang,
            lost=None if launch.nodes is None else launch.nodes.why_lost,
        )


def _tell_and_heed(launch: Launch, received: list[int], look: JointLook | None) -> bool:
    """Exchange what concerns all while other nodes finish; False once a second signal says not to wait."""
    assert launch.nodes is not None
    if look is not None and (found := look.advance()) is not None and launch.on_hang is not None:
        launch.on_hang(found[0])
    launch.nodes.exchange_signals(received)
    return len(received) < 2


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
    launch: Launch,
    workers: list[Worker],
    memory: KeptMemory,
    round_number: int,
    received: list[int],
    *,
    by_fork: bool,
) -> HangVerdict | None:
    """Start all ranks once, and return when all have ended; where they had to be ended because they hung, why."""
    memory.heartbeats.forget()
    with _store_socket(launch) as store, _store_served(launch, store, by_fork=by_fork):
        with _signals_held_back():
            for rank in range(launch.first_rank, launch.first_rank + launch.num_processes):
                worker = start_worker(launch, rank, store, memory, round_number=round_number, by_fork=by_fork)
                workers.append(worker)  # one by one: those started must be known if the next cannot be
        if store.listener is not None:
            store.listener.close()
        hang = _wait(launch, workers, memory, received)
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
def _store_socket(launch: Launch) -> Iterator[StoreSocket]:
    """Bind a free port; the store is served on this very socket, so nobody can take it.

    Of the loopback interface, or of the rendezvous address, where other nodes are told of it.
    """
    nodes = launch.nodes
    is_here = nodes is None or nodes.me.node_rank == 0
    host = "127.0.0.1" if nodes is None else nodes.members[0].address
    listener = _listening_on(host) if is_here else None
    try:
        port = None if listener is None else int(listener.getsockname()[1])
        if nodes is not None:
            port = int(nodes.gather(port)[0])  # each node says so when it is ready to start its ranks
            nodes.watch()
        assert port is not None
        yield StoreSocket(host=host, port=port, listener=listener)
    finally:
        if listener is not None:
            listener.close()


def _listening_on(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=1024)


def _store_served(launch: Launch, store: StoreSocket, *, by_fork: bool) -> AbstractContextManager[object]:
    if not launch.serves_store or store.listener is None:
        return nullcontext()
    return closing(StoreServer(store.listener, by_fork=by_fork))


@contextmanager
def _passing_signals_on(workers: list[Worker]) -> Iterator[list[int]]:
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if not workers:
            raise _StoppedBeforeStart
        _pass_on(number, workers, is_first=len(received) == 1)

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


def _pass_on(number: int, workers: list[Worker], *, is_first: bool) -> None:
    for worker in workers:
        if is_first:
            worker.send(number)
        else:
            worker.stop_at_once()


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """Deliver stop signals only when every worker is known, so that none misses a signal passed on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(launch: Launch, workers: list[Worker], memory: KeptMemory, received: list[int]) -> HangVerdict | None:
    """Wait until all have ended; after the first end, only as long as its grace lasts.

    Returns:
        Why they will not end by themselves, if they hang and are not to be waited for.
    """
    watchdog = None if launch.hangs is None else Watchdog(memory.heartbeats, launch.hangs.hang_after)
    look = _joint_look(launch, workers, memory, watchdog)
    deadline: float | None = None
    while True:
        alive = _still_alive(workers)
        if not alive:
            return None
        ending = _ending([worker.end for worker in workers if worker.end is not None])
        grace = _grace(ending, launch, [worker.end for worker in workers if worker.end is not None])
        others: list[int] = [] if launch.pump is None else [*launch.pump.waiting_for]
        if launch.nodes is not None:
            grace = _least(grace, _heed_others(launch, launch.nodes, workers, received, ending))
            others += launch.nodes.descriptors
        if grace is not None:
            deadline = min(deadline or float("inf"), time.monotonic() + grace)
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            return None
        _sleep_until_one_ends(alive, _LOOK_SECONDS if left is None else min(_LOOK_SECONDS, left), others)
        if launch.pump is not None:
            launch.pump.start_if_needed()
        if watchdog is not None and deadline is None:
            hang = _hang(launch, workers, memory, watchdog, look)
            if hang is not None:
                return hang


def _joint_look(
    launch: Launch, workers: list[Worker], memory: KeptMemory, watchdog: Watchdog | None
) -> JointLook | None:
    """Return the look that this node takes together with others, where there are others."""
    hangs = launch.hangs
    if launch.nodes is None or hangs is None:
        return None

    def acts(seconds: float, is_certain: bool) -> bool:
        return watchdog is not None and hangs.acts(seconds, watchdog.last_threshold, is_certain=is_certain)

    return JointLook(launch.nodes, lambda: examine(workers, memory.heartbeats), acts)


def _hang(
    launch: Launch, workers: list[Worker], memory: KeptMemory, watchdog: Watchdog, look: JointLook | None
) -> HangVerdict | None:
    """Tell of ranks that are not getting on; return why, if they are to be ended."""
    seconds = watchdog.silent_seconds([worker.rank for worker in workers if worker.end is None])
    if look is not None:
        if seconds is not None:
            look.ask(seconds)
        found = look.advance()
        if found is not None and launch.on_hang is not None:
            launch.on_hang(found[0])
        return found[0] if found is not None and found[1] else None
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


def _heed_others(
    launch: Launch, nodes: Nodes, workers: list[Worker], received: list[int], ending: str | None
) -> float | None:
    """Exchange with the other nodes what concerns all; return what their news leave the ranks here, if anything."""
    nodes.pump()
    for number in nodes.exchange_signals(received):
        _pass_on(number, workers, is_first=len(received) == 1)
    if ending is not None:
        nodes.tell_ending(ending)
    if nodes.lost is not None or nodes.refusal is not None:
        return _FAILURE_GRACE_SECONDS
    graces = [_grace(said, launch) for said in nodes.endings]
    return _least(*graces) if graces else None


def _least(*graces: float | None) -> float | None:
    return min((grace for grace in graces if grace is not None), default=None)


def _ending(ends: list[WorkerEnd]) -> str | None:
    """Return what the first ranks to end mean for the others: `failed`, `stopped`, `ended`, or nothing yet."""
    ends = [end for end in ends if not end.is_tolerated]
    if any(end.exit_code != 0 and end.exit_code not in STOP_ENDS for end in ends):
        return "failed"
    if any(end.exit_code in STOP_ENDS for end in ends):
        return "stopped"
    return "ended" if ends else None


def _grace(ending: str | None, launch: Launch, ends: Sequence[WorkerEnd] = ()) -> float | None:
    """Return the seconds that the other ranks get; None: any time."""
    if ending == "failed":
        if not launch.restarts.most:
            return _FAILURE_GRACE_SECONDS
        was_killed = any(end.failure is None and end.exit_code < 0 and end.exit_code not in STOP_ENDS for end in ends)
        return 0.0 if was_killed else _RESTART_GRACE_SECONDS
    if ending == "stopped":
        return launch.stop_grace_seconds
    return launch.end_grace_seconds if ending == "ended" else None


def _sleep_until_one_ends(alive: list[Worker], most_seconds: float, others: Sequence[int] = ()) -> None:
    pidfds = [worker.pidfd for worker in alive if worker.pidfd is not None]
    if len(pidfds) < len(alive):
        time.sleep(min(_POLL_SECONDS, most_seconds))
        return
    poll = select.poll()  # select() itself takes no descriptor above 1023
    for descriptor in (*pidfds, *others):
        poll.register(descriptor, select.POLLIN)
    poll.poll(most_seconds * 1000)


def _kill(workers: list[Worker]) -> None:
    for worker in workers:
        worker.stop_at_once()
    while _still_alive(workers):
        time.sleep(0.001)
