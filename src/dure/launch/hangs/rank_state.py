"""State of one rank at the moment of a probe."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dure.failures.frames import Frame
from dure.launch.worker.stacks import without_launcher


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Call of the process group that has not returned everywhere, or the last one that has."""

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
        """Return the usual notation: `all_reduce #10 of [3] float`."""
        shapes = ", ".join(f"{size}" for size in self.sizes[:2])
        kinds = ", ".join(dict.fromkeys(self.dtypes)).lower()
        return f"{self.op} #{self.sequence}" + (f" of {shapes} {kinds}".rstrip() if shapes else "")

    @property
    def signature(self) -> tuple[str, str, str]:
        """Return the part that must be the same on all ranks."""
        return self.op, str(self.sizes), str(self.dtypes)


@dataclass(frozen=True, kw_only=True)
class Call:
    """Current `torch.distributed` call of a thread, read from its frames; gloo records no sends and receives."""

    op: str
    group: str
    role: str | None
    """`src` or `dst` if one rank has that role."""
    peer: int | None
    """Rank in that role; None if it is any, or unknown."""
    tag: int
    sizes: list[Any]
    is_main: bool
    """True if the call is in the main thread."""


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
    """Number of collectives requested from the group of all ranks at its last heartbeat; -1 if unknown."""
    exit_code: int | None = None
    """Exit code of a rank that has ended; None while it runs."""
    failure: str | None = None
    """Failure that a rank which still runs has reported, in brief."""
    handled: str | None = None
    """Exception that its main thread is handling, as in a `finally`; None if there is none, or a lost rank's."""
    is_stopped: bool = False
    """True if the system keeps the rank from running: SIGSTOP, Ctrl-Z or a debugger."""
    has_closed_socket: bool = False
    """True if it has closed the socket for probes, as do scripts that close all descriptors."""
    busy_fraction: float = 0.0
    """Fraction of the probe during which its main thread was running, or ready to run."""
    blocked_fraction: float = 0.0
    """Fraction of the probe during which the kernel kept its main thread waiting where no signal reaches it."""
    main: tuple[Frame, ...] = ()
    """Frames of the main thread, innermost first."""
    others: tuple[tuple[Frame, ...], ...] = ()
    """Frames of its other threads."""
    collectives: tuple[Collective, ...] | None = None
    """Last collectives, oldest first; None if the rank could not reply."""
    call: Call | None = None
    """Call in which a thread of the script is."""
    called: str | None = None
    """Name of the function that the main thread's innermost line calls, if the source shows it."""
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Ranks of each process group that it knows, by the group's name."""
    calls: int = -1
    """Number of calls of all process groups so far, sends and receives included; -1 if unknown."""

    @property
    def whereabouts(self) -> tuple[object, ...]:
        """Values, at least one of which changes when the rank makes progress."""
        return self.step, self.calls, self.main, self.exit_code

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def frames_from(frames: Iterable[Sequence[Any]]) -> tuple[Frame, ...]:
    return without_launcher(Frame(file=file, line=line, function=name) for file, line, name in frames)


def collective_from(entry: Mapping[str, Any]) -> Collective:
    """Parse one entry of `torchcompat.calls.flight_record`."""
    return Collective(**{**entry, "frames": frames_from(entry["frames"])})
