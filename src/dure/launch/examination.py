"""Asks every rank what it is at, while it hangs: its Python stacks, its collectives, and what the system sees of it."""

import ctypes
import itertools
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from dure.frames import OWN_ROOT, Frame
from dure.heartbeat import Heartbeats
from dure.launch.observer import STACKS_SIGNAL, STATE
from dure.launch.questions import wait_for_answers

if TYPE_CHECKING:
    from dure.launch.workers import Worker

_PATIENCE_SECONDS = 1.0
"""A rank that has not answered by then cannot: it is stopped, or native code holds the interpreter."""
_NUM_SAMPLES, _SAMPLE_SECONDS = 10, 0.01
_NUM_QUIET = 10
"""Samples in which nothing was written any more: then the stacks are whole."""
_TGKILL = {"x86_64": 234, "aarch64": 131}
"""The number of the system call that sends a signal to one thread, for no library's function does."""
_STACKS_LIMIT_BYTES = 2**20
_LAUNCHER = f"{OWN_ROOT}launch{os.sep}child.py"
_MAIN = re.compile(r"^main thread 0x([0-9a-f]+)$", re.M)
_OBSERVER = re.compile(r"^observer (\d+)$", re.M)
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
class Call:
    """The call of `torch.distributed` that a thread is in, by its frames; gloo's record knows no sends and receives."""

    op: str
    group: str
    role: str | None
    """`src` or `dst`, where one rank has that part."""
    peer: int | None
    """The rank in that role; None: any, or not known."""
    tag: int
    sizes: list[Any]
    is_main: bool
    """True if it is the main thread's."""


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
    call: Call | None = None
    """Call that a thread of the script is in."""
    called: str | None = None
    """Name of what the main thread's innermost line calls, where the source says it."""
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """The ranks of each process group that it knows, by the group's name."""
    calls: int = -1
    """Calls that it has made of all process groups, sends and receives too; -1: not known."""

    @property
    def whereabouts(self) -> tuple[object, ...]:
        """Values of which one changes when the rank gets on."""
        return self.step, self.calls, self.main, self.exit_code

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
            "call": None if data["call"] is None else Call(**data["call"]),
        }
    )


def examine(workers: "Sequence[Worker]", heartbeats: Heartbeats) -> list[RankState]:
    """Ask all ranks at once; takes at most about three seconds, whatever they are doing."""
    alive = [worker for worker in workers if worker.end is None]
    began = time.monotonic()
    busy = _busy_fractions(alive)  # before they are asked: a rank waits for its own observer, which needs Python's lock
    answers = _answers(alive)
    mute = [worker for worker in alive if worker.rank not in answers and not is_stopped(worker.pid)]
    stacks = _written_stacks(mute)
    states = []
    for worker in workers:
        beat = heartbeats.last(worker.rank)
        told = {} if worker.end is not None else _told(worker, answers.get(worker.rank), stacks.get(worker.rank))
        state = RankState(
            rank=worker.rank,
            pid=worker.pid,
            step=beat.step,
            phase=beat.phase,
            silent_seconds=began - beat.time if beat.time else 0.0,
            sequence=beat.sequence,
            exit_code=None if worker.end is None else worker.end.exit_code,
            busy_fraction=busy.get(worker.rank, 0.0),
            **told,
        )
        states.append(state)
    return states


_Threads = tuple[tuple[Frame, ...], tuple[tuple[Frame, ...], ...]]
"""The main thread's frames, and those of the others."""


def _told(worker: "Worker", answer: Mapping[str, Any] | None, stacks: _Threads | None) -> dict[str, Any]:
    """Return the fields of a state that a rank has told of itself, or its system of it."""
    told: dict[str, Any] = {"is_stopped": is_stopped(worker.pid)}
    if answer is None:
        main, others = stacks or ((), ())
        return {**told, "main": main, "others": others}
    return {
        **told,
        "main": _frames_from(answer["main"]),
        "others": tuple(_frames_from(frames) for frames in answer["others"]),
        "collectives": tuple(collective_from(one) for one in answer["collectives"]),
        "call": answer["call"] and Call(**answer["call"]),
        "called": answer["called"],
        "groups": answer["groups"],
        "calls": answer["calls"],
    }


def _answers(workers: "Sequence[Worker]") -> dict[int, Mapping[str, Any]]:
    """Ask, and collect what comes back in time."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    waiting = {worker: worker.questions.ask(STATE) for worker in workers if not is_stopped(worker.pid)}
    done: dict[int, Mapping[str, Any]] = {}
    while waiting and (left := deadline - time.monotonic()) > 0:
        wait_for_answers([worker.questions for worker in waiting], left)
        for worker, number in list(waiting.items()):
            answer = worker.questions.take(number)
            if answer is not None:
                done[worker.rank] = answer
            if answer is not None or worker.questions.is_over:
                del waiting[worker]
    return done


def _frames_from(told: Iterable[Sequence[Any]]) -> tuple[Frame, ...]:
    return _without_launcher(Frame(file=file, line=line, function=name) for file, line, name in told)


def collective_from(told: Mapping[str, Any]) -> Collective:
    """Read one entry of `torchcompat.flight_record`."""
    return Collective(**{**told, "frames": _frames_from(told["frames"])})


def _written_stacks(workers: "Sequence[Worker]") -> dict[int, _Threads]:
    """Let ranks that cannot answer write their stacks by a signal, and wait until they are whole."""
    began_at = {worker.rank: os.fstat(worker.stacks_fd).st_size for worker in workers}
    for worker in workers:
        _ask_by_signal(worker)
    before: dict[int, int] = {}
    num_quiet = 0
    deadline = time.monotonic() + (_PATIENCE_SECONDS if workers and STACKS_SIGNAL is not None else 0.0)
    while time.monotonic() < deadline:
        here = [worker for worker in workers if _stat(worker.pid)[0] not in "?Z"]
        sizes = {worker.rank: os.fstat(worker.stacks_fd).st_size for worker in here}
        num_quiet = num_quiet + 1 if sizes == before else 0
        if num_quiet > _NUM_QUIET and all(size > began_at[rank] for rank, size in sizes.items()):
            break
        before = sizes
        time.sleep(_SAMPLE_SECONDS)
    return {worker.rank: _stacks(worker.stacks_fd, began_at[worker.rank]) for worker in workers}


def _ask_by_signal(worker: "Worker") -> None:
    """Send the signal to the thread that looks, for in any other it would cut a system call of the script's short."""
    if STACKS_SIGNAL is None:
        return
    observer = _OBSERVER.search(_head(worker.stacks_fd))
    call = _TGKILL.get(os.uname().machine) if sys.platform == "linux" else None
    if observer is None or call is None:
        with suppress(OSError):
            worker.send(STACKS_SIGNAL)
    else:
        ctypes.CDLL(None).syscall(call, worker.pid, int(observer[1]), int(STACKS_SIGNAL))


def _head(descriptor: int) -> str:
    return os.pread(descriptor, 256, 0).decode(errors="replace")


def _stacks(descriptor: int, begin: int) -> _Threads:
    """Read what a rank's handler has written since `begin`."""
    return parse_stacks(_head(descriptor), os.pread(descriptor, _STACKS_LIMIT_BYTES, begin).decode(errors="replace"))


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
    """Return how much of the time each main thread was running, or would have been had there been a core for it."""
    counts = dict.fromkeys((worker.rank for worker in workers), 0)
    used = {worker.rank: _used_seconds(worker.pid) for worker in workers}
    began = time.monotonic()
    for _ in range(_NUM_SAMPLES):
        for worker in workers:
            counts[worker.rank] += _stat(worker.pid)[0] == "R"
        time.sleep(_SAMPLE_SECONDS)
    seconds = time.monotonic() - began
    # the system adds up a wait for a core when it is over, and a sample may fall on moments that are no rule
    return {
        worker.rank: max(
            counts[worker.rank] / _NUM_SAMPLES,
            min(1.0, (_used_seconds(worker.pid) - used[worker.rank]) / seconds),
        )
        for worker in workers
    }


def _used_seconds(pid: int) -> float:
    """Return how long a main thread has run and has waited for a core; 0 where the system does not count it."""
    try:
        with open(f"/proc/{pid}/task/{pid}/schedstat", encoding="ascii") as file:
            ran, waited, _ = file.read().split()
    except (OSError, ValueError):
        return 0.0
    return (int(ran) + int(waited)) / 1e9


def _stat(pid: int) -> list[str]:
    """Return the main thread's fields in `/proc` from the state on; the name before it may hold anything."""
    try:
        with open(f"/proc/{pid}/task/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return ["?"]
