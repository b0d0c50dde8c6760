"""Record of a rank's failure: its file, its report to the supervisor, and its form in messages between nodes."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from dure.checked import Count, ExitCode, Flag, Rank, Text, Time, checked
from dure.documents import DocumentInvalid, read_json
from dure.errors import ReplicasDiverged
from dure.failures.frames import from_here

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class CodeLine:
    """Line of code to which a failure is traced."""

    file: Text
    line: Count | None
    """Line number; None if it is unknown."""
    function: Text
    text: Text | None
    """Text of the line; None if it cannot be read."""

    @property
    def place(self) -> str:
        """File, relative to the current folder, and line."""
        return f"{from_here(self.file)}:{self.line}"

    def __str__(self) -> str:
        """Return location and text of the line, if it can be read."""
        where = f"{self.place} in {self.function}"
        return f"{where}: {self.text}" if self.text else where


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """Failure of a rank: when and where in the user's code it occurred, and whether it is only a consequence."""

    rank: Rank
    host: Text
    pid: Count
    time: Time
    step: Count | None
    """Last completed step; None before training."""
    type: Text
    """Name of the exception's class."""
    message: Text
    advice: Text | None = None
    """Cure; None if none is known."""
    exit_code: ExitCode
    is_ours: Flag
    """True if dure raised it deliberately."""
    is_misuse: Flag
    """True if the user can fix it."""
    is_consequence: Flag
    """True if it is only a consequence of another rank's failure."""
    may_be_gpu: Flag = False
    is_gpu_lost: Flag = False
    origin: Literal["task", "library", "dure"] = "task"
    """Owner of the code that raised it."""
    microbatch_size: Count | None = None
    """Samples that a device computed at once, if memory ran out for them; None otherwise."""
    go_back_to: Count | None = None
    """Samples seen when all replicas last agreed, if the run will continue from there; None otherwise."""
    user_line: CodeLine | None
    """Innermost line of the user's code; None if it did not pass through any."""
    user_traceback: Text | None
    """Traceback through the user's code; None if it is a single line."""
    traceback: Text
    is_after_loss: Flag = False
    """True if the script had lost another rank before, which the error itself does not mention."""
    has_timed_out: Flag = False
    """True if it is a consequence because the rank timed out waiting for another, which may never have arrived."""
    handled: tuple[Text, ...] = ()
    """Exceptions that were being handled when it was raised, in brief, the last first: one may be the real reason."""
    collective: Text | None = None
    """Collective that a script's rank was in, or was in last; None if unknown, and for a task's rank."""
    left_group_at: Time | None = None
    """Time at which a script's rank had left the group of all ranks; None if it had not, and for a task's rank."""

    @property
    def is_divergence(self) -> bool:
        """Return whether it reports a difference between ranks that must hold equal state."""
        return self.is_ours and self.type == ReplicasDiverged.__name__


@dataclass(frozen=True, kw_only=True)
class Departure:
    """Exit of a script by `sys.exit`."""

    message: Text | None
    """Message passed to it; None if it was a code or nothing."""
    user_line: CodeLine | None
    """Line of the call; None if it is not in user code."""
    may_follow_signal: Flag = True
    """True if a signal that this process received may be its reason: it has handlers, or caught `KeyboardInterrupt`."""
    is_consequence: Flag = False
    """True if the script called it because it had lost another rank."""
    has_timed_out: Flag = False
    """True if it had timed out waiting for that rank."""
    time: Time | None = None
    """Time of the call; None if it is unknown."""
    handled: tuple[Text, ...] = ()
    """Exceptions that were being handled when it was called, in brief, the last first."""
    left_group_at: Time | None = None
    """Time at which it had left the group of all ranks; None if it had not."""


_TIMEOUT = re.compile(r"timed? ?out|within [\d.e+]+ s", re.IGNORECASE)
_FAILURE = TypeAdapter(FailureRecord)
_DEPARTURE = TypeAdapter(Departure)


def failure_to_json(failure: FailureRecord) -> dict[str, Any]:
    """Return a failure as plain JSON values."""
    return {"version": VERSION, **asdict(failure)}


def failure_from_json(found: object) -> FailureRecord:
    """Return a failure from a result of `failure_to_json`, in this version of dure or an older one.

    Raises:
        DocumentInvalid: It is not a failure.
    """
    return checked(_FAILURE, found, VERSION)


def departure_from_json(found: object) -> Departure:
    """Return a departure from its fields as a dict.

    Raises:
        DocumentInvalid: It is not a departure.
    """
    return checked(_DEPARTURE, found, VERSION)


def mentions_timeout(message: str) -> bool:
    """Return whether a message of torch or dure about a lost rank says that it did not answer in time."""
    return _TIMEOUT.search(message) is not None


def failure_file(rank: int) -> str:
    """Return the name of the record that a failed rank leaves in the run's folder."""
    return f"logs/failure-rank{rank}.json"


def read_failure(run: Path, rank: int) -> FailureRecord | None:
    """Return the failure that a rank wrote into the run's folder; None if there is none, or it is damaged."""
    try:
        return failure_from_json(read_json(run / failure_file(rank)))
    except (OSError, DocumentInvalid):
        return None
