"""Messages between launchers about errors and ends of ranks, as plain JSON values."""

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dure.errors import FAILED, DureError, EnvironmentLacks, Interrupted, Misuse, WorkerFailed
from dure.failures.frames import Frame
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
    return {"failure": _cut(end.failure, longest), "departure": _cut(end.departure, longest)}


def _cut(value: Any, longest: int) -> Any:
    if isinstance(value, Mapping):
        return {name: _cut(part, longest) for name, part in value.items()}
    return value[:longest] if isinstance(value, str) else value


def end_from_json(told: Mapping[str, Any], node: str, clock_behind_seconds: float) -> WorkerEnd:
    """Rebuild how a rank of another node ended, in this node's time."""
    failure = told["failure"]
    if failure is not None:
        failure = {**failure, "time": float(failure["time"]) + clock_behind_seconds}
    crash = tuple(Frame(**frame) for frame in told["crash"])
    time_ = float(told["time"]) + clock_behind_seconds
    return WorkerEnd(**{**told, "failure": failure, "crash": crash, "time": time_, "node": told["node"] or node})
