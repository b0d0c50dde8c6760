"""Asks every rank what it is at, while it hangs: its Python stacks, its collectives, and what the system sees of it."""

import itertools
import os
import re
import select
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dure.documents import parse_json
from dure.frames import OWN_ROOT, Frame
from dure.heartbeat import Heartbeats
from dure.launch.observer import LENGTH, STACKS_SIGNAL

if TYPE_CHECKING:
    from dure.launch.workers import Worker

_PATIENCE_SECONDS = 1.0
"""A rank that has not answered by then cannot: it is stopped, or native code holds the interpreter."""
_NUM_SAMPLES, _SAMPLE_SECONDS = 10, 0.01
_STACKS_LIMIT_BYTES = 2**20
_LAUNCHER = f"{OWN_ROOT}launch{os.sep}child.py"
_MAIN = re.compile(r"^main thread 0x([0-9a-f]+)$", re.M)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*:\n((?:  [^\n]*\n?)*)", re.M)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.M)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A call of the process group that has not returned everywhere, or the last one that has."""

    group: str
    sequence: int
    op: str
    sizes: list[Any]
    dtypes: list[str]
    time: float
    """Of the call, seconds since the epoch."""
    is_pending: bool
    frames: tuple[Frame, ...]
    """Where it was called, the innermost first."""

    def __str__(self) -> str:
        """Name it, as people speak of it: `all_reduce #10 of [3] float`."""
        shapes = ", ".join(f"{size}" for size in self.sizes[:2])
        kinds = ", ".join(dict.fromkeys(self.dtypes)).lower()
        return f"{self.op} #{self.sequence}" + (f" of {shapes} {kinds}".rstrip() if shapes else "")

    @property
    def signature(self) -> tuple[str, str, str]:
        """What must be the same on all ranks."""
        return self.op, str(self.sizes), str(self.dtypes)


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What one rank was at when it was looked at."""

    rank: int
    pid: int
    step: int
    phase: str
    silent_seconds: float
    """Since it last told of itself; 0 if it never did."""
    sequence: int = -1
    """Collectives that the group of all ranks had been asked for when it last told of itself; -1: not known."""
    exit_code: int | None = None
    """Of a rank that has ended."""
    is_stopped: bool = False
    """Whether the system keeps it from running: SIGSTOP, Ctrl-Z or a debugger."""
    busy_fraction: float = 0.0
    """How often its main thread had something to compute when it was looked at."""
    main: tuple[Frame, ...] = ()
    """The main thread's frames, the innermost first."""
    others: tuple[tuple[Frame, ...], ...] = ()
    """Those of its other threads."""
    collectives: tuple[Collective, ...] | None = None
    """The last ones, oldest first; None where it could not answer."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def state_from_json(data: dict[str, Any]) -> RankState:
    """Rebuild a state from `to_json`'s answer."""

    def frames(many: Sequence[dict[str, Any]]) -> tuple[Frame, ...]:
        return tuple(Frame(**frame) for frame in many)

    collectives = data["collectives"]
    return RankState(
        **{
            **data,
            "main": frames(data["main"]),
            "others": tuple(frames(thread) for thread in data["others"]),
            "collectives": None
            if collectives is None
            else tuple(Collective(**{**one, "frames": frames(one["frames"])}) for one in collectives),
        }
    )


def examine(workers: "Sequence[Worker]", heartbeats: Heartbeats) -> list[RankState]:
    """Ask all ranks at once; takes at most about two seconds, whatever they are doing."""
    alive = [worker for worker in workers if worker.end is None]
    began = time.monotonic()
    stacks_from = {worker.rank: os.fstat(worker.stacks_fd).st_size for worker in alive}
    for worker in alive:
        with suppress(OSError):
            worker.questions.send(b"?", socket.MSG_DONTWAIT)
    answers = _answers(alive)
    for worker in alive:
        # only now: the handler follows the frames of all threads without Python's lock, and the one that answers would
        # change its own under it, which crashed a rank now and then
        with suppress(OSError):
            if STACKS_SIGNAL is not None and not is_stopped(worker.pid):
                worker.send(STACKS_SIGNAL)
    busy = _busy_fractions(alive)
    _wait_for_stacks(alive, stacks_from)
    states = []
    for worker in workers:
        beat = heartbeats.last(worker.rank)
        state = RankState(
            rank=worker.rank,
            pid=worker.pid,
            step=beat.step,
            phase=beat.phase,
            silent_seconds=began - beat.time if beat.time else 0.0,
            sequence=beat.sequence,
            exit_code=None if worker.end is None else worker.end.exit_code,
        )
        if worker in alive:
            main, others = _stacks(worker.stacks_fd, stacks_from[worker.rank])
            told = {
                "is_stopped": is_stopped(worker.pid),
                "busy_fraction": busy[worker.rank],
                "main": main,
                "others": others,
                "collectives": answers.get(worker.rank),
            }
            state = RankState(**{**vars(state), **told})
        states.append(state)
    return states


def _answers(workers: "Sequence[Worker]") -> dict[int, tuple[Collective, ...]]:
    """Collect what comes back in time."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    received: dict[int, bytearray] = {worker.rank: bytearray() for worker in workers}
    done: dict[int, tuple[Collective, ...]] = {}
    waiting = {worker.questions.fileno(): worker for worker in workers if not is_stopped(worker.pid)}
    poll = select.poll()
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    while waiting and (left := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(left * 1000):
            worker = waiting[descriptor]
            try:
                data = worker.questions.recv(2**20, socket.MSG_DONTWAIT)
            except OSError:
                data = b""
            received[worker.rank] += data
            answer = _whole(received[worker.rank])
            if answer is not None:
                done[worker.rank] = answer
            if answer is not None or not data:
                poll.unregister(descriptor)
                del waiting[descriptor]
    return done


def _whole(data: bytearray) -> tuple[Collective, ...] | None:
    """Return the last answer in what has been received, if it is whole; one to an earlier question may precede it."""
    while len(data) >= LENGTH.size:
        (size,) = LENGTH.unpack_from(data)
        if len(data) < LENGTH.size + size:
            return None
        body = bytes(data[LENGTH.size : LENGTH.size + size])
        del data[: LENGTH.size + size]
        if not data:
            return tuple(collective_from(told) for told in parse_json(body)["collectives"])
    return None


def collective_from(told: Mapping[str, Any]) -> Collective:
    """Read one entry of `torchcompat.flight_record`."""
    frames = _without_launcher(Frame(file=file, line=line, function=name) for file, line, name in told["frames"])
    return Collective(**{**told, "frames": frames})


def _wait_for_stacks(workers: "Sequence[Worker]", began_at: Mapping[int, int]) -> None:
    """Wait until what the ranks were asked to write is there: a busy machine lets them wait for a core first."""
    before: dict[int, int] = {}
    deadline = time.monotonic() + (0.0 if STACKS_SIGNAL is None else _PATIENCE_SECONDS)
    while time.monotonic() < deadline:
        here = [worker for worker in workers if not is_stopped(worker.pid) and _stat(worker.pid)[0] not in "?Z"]
        sizes = {worker.rank: os.fstat(worker.stacks_fd).st_size for worker in here}
        if sizes == before and all(size > began_at[rank] for rank, size in sizes.items()):
            return
        before = sizes
        time.sleep(_SAMPLE_SECONDS)


def _stacks(descriptor: int, begin: int) -> tuple[tuple[Frame, ...], tuple[tuple[Frame, ...], ...]]:
    """Read what a rank's handler has written since `begin`: the main thread's frames, and those of the others."""
    head = os.pread(descriptor, 256, 0).decode(errors="replace")
    text = os.pread(descriptor, _STACKS_LIMIT_BYTES, begin).decode(errors="replace")
    return parse_stacks(head, text)


def crash_frames(descriptor: int) -> tuple[Frame, ...]:
    """Return where a rank's main thread was when native code crashed, the innermost first; nothing if it did not."""
    text = os.pread(descriptor, _STACKS_LIMIT_BYTES, 0).decode(errors="replace")
    head, is_crash, told = text.rpartition("Fatal Python error: ")
    return parse_stacks(head, told)[0] if is_crash else ()


def _frames(text: str) -> tuple[Frame, ...]:
    found = (Frame(file=file, line=int(line), function=name) for file, line, name in _FRAME.findall(text))
    return _without_launcher(found)


def parse_stacks(head: str, text: str) -> tuple[tuple[Frame, ...], tuple[tuple[Frame, ...], ...]]:
    """Read what `faulthandler` wrote.

    Args:
        head: The line that names the main thread.
        text: One dump of all threads.
    """
    named = _MAIN.search(head)
    main: tuple[Frame, ...] = ()
    others = []
    for ident, body in _THREAD.findall(text):
        frames = _frames(body)
        if named is not None and int(ident, 16) == int(named[1], 16):
            main = frames
        else:
            others.append(frames)
    return main, tuple(others)


def _without_launcher(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Leave out the frames that started this process: what a forked one has of its parent's stack is not its own."""
    return tuple(itertools.takewhile(lambda frame: frame.file != _LAUNCHER, frames))


def is_stopped(pid: int) -> bool:
    """Tell whether a signal or a debugger holds a process."""
    return _stat(pid)[0] in ("T", "t")


def _busy_fractions(workers: "Sequence[Worker]") -> dict[int, float]:
    """Return how often each main thread was running, or would have been had there been a core for it."""
    counts = dict.fromkeys((worker.rank for worker in workers), 0)
    for _ in range(_NUM_SAMPLES):
        for worker in workers:
            counts[worker.rank] += _stat(worker.pid)[0] == "R"
        time.sleep(_SAMPLE_SECONDS)
    return {rank: count / _NUM_SAMPLES for rank, count in counts.items()}


def _stat(pid: int) -> list[str]:
    """Return the main thread's fields in `/proc` from the state on; the name before it may hold anything."""
    try:
        with open(f"/proc/{pid}/task/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return ["?"]
