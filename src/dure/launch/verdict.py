"""From what the ranks left behind to one answer: who failed first, where, and who only followed."""

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SAID_BY_SIGNAL = {
    signal.SIGKILL: "killed (SIGKILL): by somebody, or by the kernel when memory ran out",
    signal.SIGSEGV: "crashed in native code (SIGSEGV)",
    signal.SIGABRT: "aborted in native code (SIGABRT)",
    signal.SIGBUS: "crashed in native code (SIGBUS): often a full /dev/shm or a file that shrank",
    signal.SIGTERM: "ended by SIGTERM",
}


@dataclass(frozen=True, kw_only=True)
class WorkerEnd:
    """How one worker process ended."""

    rank: int
    exit_code: int
    """As `subprocess` gives it: negative for a signal."""
    time: float
    """When the supervisor saw it, seconds since the epoch."""
    was_stopped: bool
    """Whether the supervisor itself ended it, because another rank had failed."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The first causal failure in front, the rest folded."""

    text: str
    exit_code: int
    first: Mapping[str, Any] | None
    """The failure record of the first cause, when that rank left one."""


def judge(run: Path, ends: list[WorkerEnd]) -> Verdict | None:
    """Find the first cause among the ranks that failed; None when none did.

    An exception that only says that a peer went away is never the cause while there is another; a rank that died
    without a word (a signal) is, unless the supervisor ended it.
    """
    failures = {end.rank: read_failure(run, end.rank) for end in ends}
    failed = [end for end in ends if end.exit_code not in (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)]
    if not failed:
        return None

    def order(end: WorkerEnd) -> tuple[bool, bool, float, int]:
        failure = failures[end.rank]
        is_consequence = end.was_stopped if failure is None else bool(failure["is_consequence"])
        return is_consequence, end.was_stopped, end.time if failure is None else failure["time"], end.rank

    first, *others = sorted(failed, key=order)
    failure = failures[first.rank]
    lines = [_silent_death(first, len(ends)) if failure is None else _told(failure, len(ends))]
    same = [e for e in others if (f := failures[e.rank]) and failure and f["message"] == failure["message"]]
    followed = [e for e in others if e not in same]
    if len(ends) > 1 and followed and not (failure and failure["is_misuse"]):
        ranks = ", ".join(str(end.rank) for end in sorted(followed, key=lambda end: end.rank))
        lines.append(f"rank {ranks} ended as a consequence; see logs/ in {run}")
    return Verdict(text="\n".join(lines), exit_code=1 if failure is None else int(failure["exit_code"]), first=failure)


def read_failure(run: Path, rank: int) -> dict[str, Any] | None:
    """Return what a rank wrote down when it failed, or None."""
    try:
        record = json.loads((run / "logs" / f"failure-rank{rank}.json").read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _told(failure: Mapping[str, Any], num_ranks: int) -> str:
    if failure["is_ours"]:
        return str(failure["message"])
    where = "" if failure["step"] is None else f" after step {failure['step']}"
    who = f"rank {failure['rank']}" if num_ranks > 1 else "the task"
    text = f"{who} failed{where}: {failure['type']}: {failure['message']}"
    line = failure["user_line"]
    if line:
        text += f"\n  {line['file']}:{line['line']} in {line['function']}: {line['text']}"
    if failure["user_traceback"]:
        text += f"\n{failure['user_traceback']}"
    return text


def _silent_death(end: WorkerEnd, num_ranks: int) -> str:
    who = f"rank {end.rank}" if num_ranks > 1 else "the worker"
    if end.exit_code < 0:
        number = -end.exit_code
        said = _SAID_BY_SIGNAL.get(signal.Signals(number), f"ended by {signal.Signals(number).name}")
        return f"{who} was {said}; `dure train --resume` continues from the last good checkpoint"
    return f"{who} ended with exit code {end.exit_code} and said nothing"
