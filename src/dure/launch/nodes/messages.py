"""Messages between the launchers of a run: one record per kind, and their conversion to and from plain values."""

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from signal import NSIG
from typing import Annotated, Any, get_args

from pydantic import Field

from dure.checked import Count, Flag, Rank, Step, Text, Time, record_from_json
from dure.documents import DocumentInvalid
from dure.errors import FAILED, DureError, EnvironmentLacks, Interrupted, Misuse, WorkerFailed
from dure.failures.record import failure_to_json
from dure.failures.verdict import WorkerEnd
from dure.launch.hangs.rank_state import RankState
from dure.launch.nodes.channel import MESSAGE_LIMIT_BYTES
from dure.launch.nodes.member import Member
from dure.process.round_orders import RoundPlan

_LONGEST_TEXT = 3000
"""Maximum characters of a traceback in a message; the whole one is in the log of its own node."""
_MOST_FRAMES = 32


@dataclass(frozen=True, kw_only=True)
class Join:
    """Introduction of a joining node."""

    num_nodes: Text
    """Number of nodes of the run, as the user gives it."""
    node_rank: Count
    host: Text
    num_ranks: Count
    round: Step = -1
    """Number of the last round in which it took part; -1 if there is none."""
    facts: Mapping[str, Any]
    """Facts that must be the same on all nodes, by their names in messages."""
    time: Time = 0.0
    """Time of sending, by the clock of its node."""


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """Reply of the leader to an admitted node."""

    leader: Count
    members: tuple[Member, ...]
    folder: Text | None = None
    """Folder of the run, if it is in progress."""
    term: Count = 0
    """Term of the leader."""
    keeps_memory: Flag = False
    """True if that node's snapshots in memory are of the state from which the run continues."""


@dataclass(frozen=True, kw_only=True)
class Later:
    """Reply of the leader to a node that has to try again."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Reason why a node does not continue."""

    message: Text
    code: Count
    """Exit code of its launcher."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Sign of life."""


@dataclass(frozen=True, kw_only=True)
class Gather:
    """Value of one node for an exchange among all."""

    value: Any


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Values of all nodes."""

    values: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Notice that a node has imported what its ranks need."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """Start of a round."""

    number: Count
    port: Count
    """Port of its store, on the leader."""
    members: tuple[Member, ...]
    """Participating nodes."""
    plan: RoundPlan


@dataclass(frozen=True, kw_only=True)
class Signal:
    """Stop signal received by a node."""

    number: Annotated[int, Field(strict=True, ge=1, lt=NSIG)]
    ordinal: Count
    """Ordinal of the signal on that node, from 1."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Notice that the first ranks of a node have ended."""

    why: Text
    """`failed`, `stopped` or `ended`."""


@dataclass(frozen=True, kw_only=True)
class End:
    """End of one rank."""

    end: Mapping[str, Any]
    """Record of the end, as returned by `end_to_json`."""
    node_rank: Count | None = None
    """Node of the rank; None if it is the sender's."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """Notice that all ranks of a node have ended."""

    steps: Mapping[int, Step]
    """Step of each rank at its end, by rank."""
    has_snapshots: Flag
    """True if they have left snapshots in memory."""


@dataclass(frozen=True, kw_only=True)
class Over:
    """End of the run."""

    refusal: Text | None = None
    """Reason why the ranks were not restarted, if it is not only the failure."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Reason why a round cannot go on."""

    text: Text
    is_fatal: Flag
    """True if the run does not continue either."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Request of the leader to probe the ranks of each node."""

    number: Count


@dataclass(frozen=True, kw_only=True)
class SurveyRequest:
    """Request of a node to probe all ranks."""

    seconds: Time
    """Seconds for which no step has finished."""
    only_if_waited: Flag
    """True if it is no hang unless a rank waits for another."""
    is_confirmed: Flag
    """True if a second probe must confirm a certain verdict."""


@dataclass(frozen=True, kw_only=True)
class State:
    """State of one rank, found in a probe."""

    number: Count
    """Number of the probe."""
    state: RankState


@dataclass(frozen=True, kw_only=True)
class Surveyed:
    """Notice that a node has sent the states of all its ranks."""

    number: Count
    """Number of the probe."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Verdict on the ranks of all nodes."""

    text: Text
    culprits: tuple[Rank, ...]
    is_certain: Flag
    acts: Flag
    """True if the ranks will be ended."""


@dataclass(frozen=True, kw_only=True)
class NoHang:
    """Result of a probe that found no hang."""

    seconds: Time
    """Seconds for which no step had finished."""


SurveyMessage = Survey | SurveyRequest | State | Surveyed | Hang | NoHang
Message = (
    Join | Welcome | Later | Refused | Beat | Gather | Gathered | Ready | Round | Signal | Ending | End | Done | Over
    | Lost | SurveyMessage
)  # fmt: skip
_KINDS: Mapping[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> dict[str, Any]:
    """Return a message as plain values."""
    return {"kind": type(message).__name__, **asdict(message)}


def decode(data: Mapping[str, Any]) -> Message:
    """Rebuild a message from the result of `encode`; a peer may have sent anything.

    Raises:
        DocumentInvalid: It is not a message; the error has the reason.
    """
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise DocumentInvalid(f"of kind {str(kind)[:40]!r} is not known")
    try:
        return record_from_json(_KINDS[kind], data)
    except DocumentInvalid as error:
        raise DocumentInvalid(f"of kind {kind} {error}") from None


def refusal_of(error: BaseException) -> Refused:
    """Return the message that informs other nodes why this one does not continue."""
    if isinstance(error, DureError):
        return Refused(message=str(error)[:_LONGEST_TEXT], code=error.exit_code)
    what = "was stopped" if isinstance(error, KeyboardInterrupt) else f"ended by {type(error).__name__}"
    return Refused(message=f"the launcher on {socket.gethostname()} {what}", code=FAILED)


def refused_error(refused: Refused) -> DureError:
    """Return another node's refusal as an error of this one."""
    text, code = refused.message, refused.code
    if code == Misuse.exit_code:
        return Misuse(text)
    if code == EnvironmentLacks.exit_code:
        return EnvironmentLacks(text)
    return WorkerFailed(text) if code == FAILED else Interrupted(text, code or FAILED)


def end_to_json(end: WorkerEnd) -> dict[str, Any]:
    """Return an end as a message: the task decides how long its texts are, and the channel how long they may be."""
    record = {**asdict(end), **_texts_of(end, _LONGEST_TEXT), "crash": []}
    if len(json.dumps(record)) > MESSAGE_LIMIT_BYTES // 2:
        record |= _texts_of(end, _LONGEST_TEXT // 10)
    return {**record, "crash": [asdict(frame) for frame in end.crash[:_MOST_FRAMES]]}


def _texts_of(end: WorkerEnd, longest: int) -> dict[str, Any]:
    failure = None if end.failure is None else failure_to_json(end.failure)
    departure = None if end.departure is None else asdict(end.departure)
    return {"failure": _cut(failure, longest), "departure": _cut(departure, longest)}


def _cut(value: Any, longest: int) -> Any:
    if isinstance(value, Mapping):
        return {name: _cut(part, longest) for name, part in value.items()}
    return value[:longest] if isinstance(value, str) else value


def end_from_json(record: Mapping[str, Any], node: str, clock_behind_seconds: float) -> WorkerEnd:
    """Rebuild the end of a rank on another node, in this node's time.

    Raises:
        DocumentInvalid: It is not the end of a rank.
    """
    end = record_from_json(WorkerEnd, record)
    failure, departure = (
        None if report is None else _in_own_time(report, clock_behind_seconds)
        for report in (end.failure, end.departure)
    )
    here: WorkerEnd = _in_own_time(end, clock_behind_seconds)
    return replace(here, failure=failure, departure=departure, node=end.node or node)


def _in_own_time(record: Any, clock_behind_seconds: float) -> Any:
    times = {name: getattr(record, name) for name in ("time", "left_group_at")}
    return replace(record, **{name: time + clock_behind_seconds for name, time in times.items() if time is not None})
