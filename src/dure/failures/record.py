"""Record of a rank's failure, as its file, its report to the supervisor and messages between nodes hold it."""

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
    """Line of code that a failure is traced to."""

    file: Text
    line: Count | None
    """Number of the line; None if it is unknown."""
    function: Text
    text: Text | None
    """Text of the line; None if it cannot be read."""

    @property
    def place(self) -> str:
        """File, as one would type it from here, and line."""
        return f"{from_here(self.file)}:{self.line}"

    def __str__(self) -> str:
        """Show where it is, and what stands there."""
        return f"{self.place} in {self.function}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class FailureRecord:
    """Failure of a rank: who, when, where in the user's code, and whether it is only a consequence."""

    rank: Rank
    host: Text
    pid: Count
    time: Time
    step: Count | None
    """Last step that was done; None before training."""
    type: Text
    """Name of the exception's class."""
    message: Text
    advice: Text | None = None
    """Cure, where one is known."""
    exit_code: ExitCode
    is_ours: Flag
    """True if dure raised it on purpose."""
    is_misuse: Flag
    """True if the user can mend it."""
    is_consequence: Flag
    """True if it only followed from another rank's failure."""
    may_be_gpu: Flag = False
    is_gpu_lost: Flag = False
    origin: Literal["task", "library", "dure"] = "task"
    """Owner of the code that raised it."""
    microbatch_size: Count | None = None
    """Samples that a device computed at once, if memory ran out for them; None otherwise."""
    go_back_to: Count | None = None
    """Samples seen when all replicas agreed last, if the run is to go on from there; None otherwise."""
    user_line: CodeLine | None
    """Innermost line of the user's code; None if it did not pass through any."""
    user_traceback: Text | None
    """Traceback through the user's code, if there is more of it than one line."""
    traceback: Text
    collective: Text | None = None
    """Collective that a script's rank was in, or was in last; None if none is known, and for a task's rank."""

    @property
    def is_divergence(self) -> bool:
        """Return whether it says that ranks do not hold the same, though they must."""
        return self.is_ours and self.type == ReplicasDiverged.__name__


@dataclass(frozen=True, kw_only=True)
class Departure:
    """End of a script that left by `sys.exit`."""

    message: Text | None
    """Message that it gave; None if it gave a code or nothing."""
    user_line: CodeLine | None
    """Line of the call; None if it is not the user's."""


_FAILURE = TypeAdapter(FailureRecord)
_DEPARTURE = TypeAdapter(Departure)


def failure_to_json(failure: FailureRecord) -> dict[str, Any]:
    """Return a failure as plain JSON values."""
    return {"version": VERSION, **asdict(failure)}


def failure_from_json(found: object) -> FailureRecord:
    """Return a failure from what `failure_to_json` returned, in this version of dure or an older one.

    Raises:
        DocumentInvalid: It is no failure.
    """
    return checked(_FAILURE, found, VERSION)


def departure_from_json(found: object) -> Departure:
    """Return a departure from its fields as a dict.

    Raises:
        DocumentInvalid: It is no departure.
    """
    return checked(_DEPARTURE, found, VERSION)


def failure_file(rank: int) -> str:
    """Return the name of the record that a failed rank leaves in the run folder."""
    return f"logs/failure-rank{rank}.json"


def read_failure(run: Path, rank: int) -> FailureRecord | None:
    """Return the failure that a rank wrote into the run folder; None if there is none, or it is damaged."""
    try:
        return failure_from_json(read_json(run / failure_file(rank)))
    except (OSError, DocumentInvalid):
        return None
