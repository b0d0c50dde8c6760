"""Messages between launchers about errors and ends of ranks, as plain JSON values."""

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from dure.errors import FAILED, DureError, EnvironmentLacks, Interrupted, Misuse, WorkerFailed
from dure.failures.frames import Frame
from dure.failures.record import departure_from_json, failure_from_json, failure_to_json
from dure.failures.verdict import WorkerEnd
from dure.launch.nodes.channel import MESSAGE_LIMIT_BYTES

_LONGEST_TEXT = 3000
"""Longest traceback in a message, in characters; the whole one is in the log of its own node."""
_MOST_FRAMES = 32


def refusal_of(error: BaseException) -> dict[str, Any]:
    """Return the message by which a node tells the others why it does not go on."""
    if isinstance(error, DureError):
        return {"kind": "refused", "message": str(error)[:_LONGEST_TEXT], "code": error.exit_code}
    what = "was stopped" if isinstance(error, KeyboardInterrupt) else f"ended by {type(error).__name__}"
    return {"kind": "refused", "message": f"the launcher on {socket.gethostname()} {what}", "code": FAILED}


def refused_error(message: Mapping[str, Any]) -> DureError:
    """Return what another node refused, as an error of this one."""
    text, code = str(message.get("message")), message.get("code")
    if code == Misuse.exit_code:
        return Misuse(text)
    if code == EnvironmentLacks.exit_code:
        return EnvironmentLacks(text)
    return WorkerFailed(text) if code == FAILED else Interrupted(text, int(code or FAILED))


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
    """Rebuild how a rank of another node ended, in this node's time."""
    failure = None if told["failure"] is None else failure_from_json(told["failure"])
    if failure is not None:
        failure = replace(failure, time=failure.time + clock_behind_seconds)
    departure = None if told["departure"] is None else departure_from_json(told["departure"])
    crash = tuple(Frame(**frame) for frame in told["crash"])
    time_ = float(told["time"]) + clock_behind_seconds
    own = {"failure": failure, "departure": departure, "crash": crash, "time": time_, "node": told["node"] or node}
    return WorkerEnd(**{**told, **own})
