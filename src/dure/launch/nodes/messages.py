"""Messages between the launchers of a run: one record per kind, and their way into plain values and back."""

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
"""Longest traceback in a message, in characters; the whole one is in the log of its own node."""
_MOST_FRAMES = 32


@dataclass(frozen=True, kw_only=True)
class Join:
    """Introduction of a node that comes."""

    num_nodes: Text
    """Nodes of the run, as the user gives them."""
    node_rank: Count
    host: Text
    num_ranks: Count
    round: Step = -1
    """Number of the last round that it took part in; -1 if it has not been there before."""
    facts: Mapping[str, Any]
    """Facts that must be the same on all nodes, by their names in words."""
    time: Time = 0.0
    """Time at which it was sent, by the clock of its node."""


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """Answer of the leader to a node that may take part."""

    leader: Count
    members: tuple[Member, ...]
    folder: Text | None = None
    """Folder of the run, if it is under way."""
    term: Count = 0
    """Term of the leader."""
    keeps_memory: Flag = False
    """True if the snapshots in memory of that node are of the state that the run goes on from."""


@dataclass(frozen=True, kw_only=True)
class Later:
    """Answer of the leader to a node that has to try again."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Reason why a node does not go on."""

    message: Text
    code: Count
    """Exit code of its launcher."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Sign of life."""


@dataclass(frozen=True, kw_only=True)
class Gather:
    """Value of one node, for all."""

    value: Any


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Values of all nodes."""

    values: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Ready:
    """Word of a node that has imported what its ranks need."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """Begin of a round."""

    number: Count
    port: Count
    """Port of its store, on the leader."""
    members: tuple[Member, ...]
    """Nodes that take part."""
    plan: RoundPlan


@dataclass(frozen=True, kw_only=True)
class Signal:
    """Stop signal that a node got."""

    number: Annotated[int, Field(strict=True, ge=1, lt=NSIG)]
    ordinal: Count
    """Ordinal of the signal on that node, from 1."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Word that the first ranks of a node have ended."""

    why: Text
    """`failed`, `stopped` or `ended`."""


@dataclass(frozen=True, kw_only=True)
class End:
    """End of one rank."""

    end: Mapping[str, Any]
    """Record of it, as `end_to_json` returns it."""
    node_rank: Count | None = None
    """Node of the rank; None if it is the sender's."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """Word that all ranks of a node have ended."""

    steps: Mapping[int, Step]
    """Step in which each was, by rank."""
    has_snapshots: Flag
    """True if they have left snapshots in memory."""


@dataclass(frozen=True, kw_only=True)
class Over:
    """End of the run."""

    refusal: Text | None = None
    """Reason why the ranks were not started once more, where there is more to say than the failure."""


@dataclass(frozen=True, kw_only=True)
class Lost:
    """Reason why a round cannot go on."""

    text: Text
    is_fatal: Flag
    """True if the run does not go on either."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Request of the leader to probe the ranks of each node."""

    number: Count


@dataclass(frozen=True, kw_only=True)
class LookWish:
    """Request of a node that all be probed."""

    seconds: Time
    """Time for which no step has finished."""
    only_if_waited: Flag
    """True if it is no hang where no rank waits for another."""
    is_confirmed: Flag
    """True if a certain verdict takes a second look."""


@dataclass(frozen=True, kw_only=True)
class State:
    """State of one rank, found in a look."""

    number: Count
    """Number of the look."""
    state: RankState


@dataclass(frozen=True, kw_only=True)
class Looked:
    """Word that a node has sent the states of all its ranks."""

    number: Count
    """Number of the look."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """Verdict over the ranks of all nodes."""

    text: Text
    culprits: tuple[Rank, ...]
    is_certain: Flag
    acts: Flag
    """True if the ranks are to be ended."""


@dataclass(frozen=True, kw_only=True)
class NoHang:
    """Result of a look that was no hang."""

    seconds: Time
    """Time for which no step had finished."""


LookMessage = Look | LookWish | State | Looked | Hang | NoHang
Message = (
    Join | Welcome | Later | Refused | Beat | Gather | Gathered | Ready | Round | Signal | Ending | End | Done | Over
    | Lost | LookMessage
)  # fmt: skip
_KINDS: Mapping[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> dict[str, Any]:
    """Return a message as plain values."""
    return {"kind": type(message).__name__, **asdict(message)}


def decode(data: Mapping[str, Any]) -> Message:
    """Rebuild a message from `encode`'s answer, which a peer may have made of anything.

    Raises:
        DocumentInvalid: It is none; says why.
    """
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise DocumentInvalid(f"of kind {str(kind)[:40]!r} is not known")
    try:
        return record_from_json(_KINDS[kind], data)
    except DocumentInvalid as error:
        raise DocumentInvalid(f"of kind {kind} {error}") from None


def refusal_of(error: BaseException) -> Refused:
    """Return the message by which a node tells the others why it does not go on."""
    if isinstance(error, DureError):
        return Refused(message=str(error)[:_LONGEST_TEXT], code=error.exit_code)
    what = "was stopped" if isinstance(error, KeyboardInterrupt) else f"ended by {type(error).__name__}"
    return Refused(message=f"the launcher on {socket.gethostname()} {what}", code=FAILED)


def refused_error(refused: Refused) -> DureError:
    """Return what another node refused, as an error of this one."""
    text, code = refused.message, refused.code
    if code == Misuse.exit_code:
        return Misuse(text)
    if code == EnvironmentLacks.exit_code:
        return EnvironmentLacks(text)
    return WorkerFailed(text) if code == FAILED else Interrupted(text, code or FAILED)


def end_to_json(end: WorkerEnd) -> dict[str, Any]:
    """Return an end as a message: the task decides how long its texts are, and the channel how long they may be."""
    told = {**asdict(end), **_said_by(end, _LONGEST_TEXT), "crash": []}
    if len(json.dumps(told)) > MESSAGE_LIMIT_BYTES // 2:
        told |= _said_by(end, _LONGEST_TEXT // 10)
    return {**told, "crash": [asdict(frame) for frame in end.crash[:_MOST_FRAMES]]}


def _said_by(end: WorkerEnd, longest: int) -> dict[str, Any]:
    failure = None if end.failure is None else failure_to_json(end.failure)
    departure = None if end.departure is None else asdict(end.departure)
    return {"failure": _cut(failure, longest), "departure": _cut(departure, longest)}


def _cut(value: Any, longest: int) -> Any:
    if isinstance(value, Mapping):
        return {name: _cut(part, longest) for name, part in value.items()}
    return value[:longest] if isinstance(value, str) else value


def end_from_json(told: Mapping[str, Any], node: str, clock_behind_seconds: float) -> WorkerEnd:
    """Rebuild how a rank of another node ended, in this node's time.

    Raises:
        DocumentInvalid: It is no end of a rank.
    """
    end, failure = record_from_json(WorkerEnd, told), None
    if end.failure is not None:
        failure = replace(end.failure, time=end.failure.time + clock_behind_seconds)
    return replace(end, failure=failure, time=end.time + clock_behind_seconds, node=end.node or node)
