"""State of one rank at the moment when it was looked at."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dure.failures.frames import Frame
from dure.launch.worker.stacks import without_launcher


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A call of the process group that has not returned everywhere, or the last one that has."""

    group: str
    sequence: int
    op: str
    sizes: list[Any]
    dtypes: list[str]
    time: float
    """Time of the call, in seconds since the epoch."""
    is_pending: bool
    frames: tuple[Frame, ...]
    """Frames of the caller, innermost first."""

    def __str__(self) -> str:
        """Name it, as people speak of it: `all_reduce #10 of [3] float`."""
        shapes = ", ".join(f"{size}" for size in self.sizes[:2])
        kinds = ", ".join(dict.fromkeys(self.dtypes)).lower()
        return f"{self.op} #{self.sequence}" + (f" of {shapes} {kinds}".rstrip() if shapes else "")

    @property
    def signature(self) -> tuple[str, str, str]:
        """Return the part that must be the same on all ranks."""
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
    """State of one rank at the moment of a probe."""

    rank: int
    pid: int
    step: int
    phase: str
    silent_seconds: float
    """Seconds since its last heartbeat; 0 if there was none."""
    sequence: int = -1
    """Number of collectives that the group of all ranks had been asked for at its last heartbeat; -1 if unknown."""
    exit_code: int | None = None
    """Exit code of a rank that has ended; None while it runs."""
    is_stopped: bool = False
    """True if the system keeps the rank from running: SIGSTOP, Ctrl-Z or a debugger."""
    has_closed_socket: bool = False
    """True if it has closed the socket on which it is asked, as scripts do that close all descriptors."""
    busy_fraction: float = 0.0
    """Fraction of the probe during which its main thread was running, or ready to run."""
    main: tuple[Frame, ...] = ()
    """Frames of the main thread, innermost first."""
    others: tuple[tuple[Frame, ...], ...] = ()
    """Frames of its other threads."""
    collectives: tuple[Collective, ...] | None = None
    """Last collectives, oldest first; None if the rank could not answer."""
    call: Call | None = None
    """Call that a thread of the script is in."""
    called: str | None = None
    """Name of what the main thread's innermost line calls, where the source says it."""
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Ranks of each process group that it knows, by the group's name."""
    calls: int = -1
    """Number of calls of all process groups so far, sends and receives included; -1 if unknown."""

    @property
    def whereabouts(self) -> tuple[object, ...]:
        """Values of which one changes when the rank gets on."""
        return self.step, self.calls, self.main, self.exit_code

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def frames_from(told: Iterable[Sequence[Any]]) -> tuple[Frame, ...]:
    return without_launcher(Frame(file=file, line=line, function=name) for file, line, name in told)


def collective_from(told: Mapping[str, Any]) -> Collective:
    """Read one entry of `torchcompat.flight_record`."""
    return Collective(**{**told, "frames": frames_from(told["frames"])})
