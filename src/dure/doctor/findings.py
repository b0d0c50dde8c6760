"""Diagnosis of a run from its folder."""

import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dure.doctor.memory import memory_findings
from dure.doctor.slowness import slow_findings
from dure.errors import DureError, RunInvalid
from dure.failures.record import read_failure
from dure.failures.verdict import WorkerEnd, judge
from dure.launch.hangs.diagnosis import verdict_from_json
from dure.records.events import Attempt, Event, RankLost, Restarted, StepSkipped, UnknownEvent
from dure.records.finding import SEVERITIES, Finding
from dure.records.jsonl import last_record
from dure.records.run_dir import EVENTS, RunDir, os_errors_as_sentences
from dure.records.run_list import RunOverview, overview

VERSION = 1
"""Version of a diagnosis in JSON."""
_QUIET_SECONDS = 60.0
_MOST_CAUSES = 3
_MOST_RANKS = 8
_MOST_TEXT = 200
_TAIL_BYTES = 2**14
_HUNG = "the ranks were ended because they hung"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, kw_only=True)
class _HangRecord:
    """Record of a hang: the time when it was noticed, and the verdict."""

    time: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All findings, the most severe first, and of those about time the largest gain."""

    run: str
    status: str
    findings: tuple[Finding, ...]

    @property
    def worst(self) -> str | None:
        """Highest severity; None if there are no findings."""
        return max((finding.severity for finding in self.findings), key=SEVERITIES.index, default=None)

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}


def diagnose(run: RunDir) -> Diagnosis:
    """Examine all records of a run.

    Raises:
        RunInvalid: Its records cannot be read.
    """
    seen = overview(run)
    with os_errors_as_sentences(run.path, "read"), run.understood():
        events = list(run.events())
        end = _death(run, seen, events) if seen.status == "died" else _end(run, seen)
        found = [*end, *_hangs(run, seen), *_restarts(run, events), *_events(events), *_silence(run, seen)]
        found += _damaged_events(events)
        has_ended_well = seen.status == "completed" and not run.is_script
        found += _damaged_records(run, has_ended_well=has_ended_well) if seen.status != "running" else ()
        if seen.status != "unreadable":
            found += _speed(run, events)
            found += memory_findings(run.read_spec(), events) if not run.is_script else ()
    found.sort(key=lambda finding: (-SEVERITIES.index(finding.severity), -(finding.gain_fraction or 0.0)))
    return Diagnosis(run=str(run.path), status=seen.status, findings=tuple(found))


def _speed(run: RunDir, events: list[Event]) -> list[Finding]:
    """Return what makes the run slow; a note if that cannot be judged, so that its other findings are still shown."""
    try:
        with os_errors_as_sentences(run.path, "read"), run.understood():
            return slow_findings(run, None if run.is_script else run.read_spec(), events)
    except RunInvalid as error:
        return [Finding(id="speed_unknown", severity="note", what=f"its speed cannot be judged: {error}")]


def _end(run: RunDir, seen: RunOverview) -> Iterator[Finding]:
    """Yield the end of the run as the launcher reported it, if it failed or was interrupted."""
    if seen.status == "unreadable":
        yield Finding(id="unreadable", severity="error", what=str(seen.fault))
    if seen.status in ("failed", "interrupted"):
        is_failed = seen.status == "failed"
        again = None if run.is_script else run.resume_command
        message = _message(run) or seen.status
        files = [*_failure_files(run)]
        if (hang := _fatal_hang(run, seen)) is not None:
            message = f"{hang.text}\n{message}"
            files.append(_name(run, run.hangs()[-1]))
        remedy = again and f"`{again}`"
        if again and is_failed:
            remedy = f"mend the cause, then `{again}` (if that was in the task's code, with --accept-changes)"
        yield Finding(
            id=seen.status,
            severity="error" if is_failed else "warning",
            what=message,
            files=tuple(files),
            remedy=remedy,
        )


def _message(run: RunDir) -> str:
    """Return the message of its summary; empty if there is none."""
    end = run.read_end()
    return "" if end is None or end.message is None else end.message


def _damaged_records(run: RunDir, *, has_ended_well: bool) -> Iterator[Finding]:
    """Yield the record files that cannot be read to their end; one truncated line is what any crash leaves."""
    steps = sorted(run.path.glob("rank*.jsonl"))
    faults = [(path, _fault_of_steps(path)) for path in steps]
    events, has_steps = run.path / EVENTS, any(path.is_file() and last_record(path) for path in steps)
    if events.exists() and not events.is_file():
        faults.append((events, "is not a file"))
    elif has_steps and not (events.exists() and events.stat().st_size):
        faults.append((events, "is empty" if events.exists() else "is missing"))
    if not steps and has_ended_well:
        faults.append((run.records_path(0), "is missing, as are the records of all other ranks"))
    for path, fault in faults:
        if fault:
            yield Finding(
                id="damaged_records",
                severity="warning",
                what=f"{path.name} {fault}",
                files=(path.name,),
                remedy="restore it from a copy of the run; checkpoints do not need it",
            )


def _fault_of_steps(path: Path) -> str | None:
    if not path.is_file():
        return "is not a file"
    is_damaged = path.stat().st_size and not last_record(path)
    return "is damaged: its end holds no record of a step" if is_damaged else None


def _name(run: RunDir, path: Path) -> str:
    return str(path.relative_to(run.path))


def _failure_files(run: RunDir) -> list[str]:
    return [_name(run, path) for path in _by_rank(run, "failure-rank*.json")]


def _by_rank(run: RunDir, names: str) -> list[Path]:
    """Return files of `logs/` whose names end with a rank, by rank."""
    found = (path for path in run.path.glob(f"logs/{names}") if path.stem.rpartition("rank")[2].isdecimal())
    return sorted(found, key=lambda path: int(path.stem.rpartition("rank")[2]))


def _death(run: RunDir, seen: RunOverview, events: list[Event]) -> Iterator[Finding]:
    """Yield what is known of a run whose supervisor did not survive to judge it."""
    began = next((event for event in reversed(events) if isinstance(event, Attempt)), Attempt(time=0.0))
    since = began.time
    where = "" if began.pid is None else f" (process {began.pid} on {began.host})"
    logs = [path for path in _by_rank(run, "rank*.log") if (st := path.stat()).st_size and st.st_mtime >= since]
    lines = [
        "it ended without a word: its supervisor was killed, the machine went down, or the disk was full"
        f"{where}{_last_step(seen)}"
    ]
    lines += _last_records(run)
    if run.is_script:
        lines.append(
            f"  only its supervisor knew whether a rank had failed before, and why; {_what_is_left(seen, logs)}"
        )
    lines += _last_lines(logs)
    yield Finding(
        id="died",
        severity="error",
        what="\n".join(lines),
        files=tuple(_name(run, path) for path in logs[:_MOST_RANKS]),
        remedy=None if run.is_script else run.how_to_go_on(),
    )
    verdict = _verdict_of_ranks(run, since)
    if verdict is not None:
        yield Finding(
            id="rank_failed", severity="error", what=f"before that, {verdict}", files=tuple(_failure_files(run))
        )


def _what_is_left(seen: RunOverview, logs: list[Path]) -> str:
    if logs:
        return "the logs of the ranks are left"
    return "a single rank has the terminal and no log" if seen.world_size == 1 else "the ranks printed nothing"


def _verdict_of_ranks(run: RunDir, since: float) -> str | None:
    """Return a verdict from the failure reports of ranks; None if there are none, or they only report lost peers."""
    ends = []
    for path in _by_rank(run, "failure-rank*.json"):
        failure = read_failure(run.path, int(path.stem.rpartition("rank")[2]))
        if failure is not None and failure.time >= since:
            rank, code, when = failure.rank, failure.exit_code, failure.time
            ends.append(WorkerEnd(rank=rank, exit_code=code, time=when, was_stopped=False, failure=failure))
    if all(end.failure is None or end.failure.is_consequence for end in ends):
        return None
    verdict = judge(run.path, ends, is_script=run.is_script)
    return None if verdict is None else verdict.text


def _last_records(run: RunDir) -> Iterator[str]:
    """Yield the last recorded steps of the ranks, and the time of the last record."""
    last = run.last_steps()
    if not last:
        return
    steps = sorted({record.step for record in last})
    steps_text = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}, by rank"
    when = time.strftime("%H:%M:%S", time.localtime(max(record.time for record in last)))
    yield f"  the last step on record is {steps_text}, written at {when}"


def _last_lines(logs: list[Path]) -> Iterator[str]:
    """Yield the last line of each rank's log."""
    for path in logs[:_MOST_RANKS]:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        if lines:
            yield f"  {path.stem.replace('rank', 'rank ')} said last: {_COLOUR.sub('', lines[-1]).strip()[:_MOST_TEXT]}"
    if len(logs) > _MOST_RANKS:
        yield f"  … and {len(logs) - _MOST_RANKS} more ranks in logs/"


def _fatal_hang(run: RunDir, seen: RunOverview) -> _HangRecord | None:
    """Return the record of the hang for which the launcher ended the ranks, whose message does not give its cause."""
    hung = seen.status == "failed" and _message(run).startswith(_HUNG)
    return _read_hang(run, run.hangs()[-1]) if hung and run.hangs() else None


def _hangs(run: RunDir, seen: RunOverview) -> Iterator[Finding]:
    """Yield each hang as it was reported at the time, except one that ended the run, which is reported already."""
    paths = run.hangs()
    for path in paths if _fatal_hang(run, seen) is None else paths[:-1]:
        record, name = _read_hang(run, path), _name(run, path)
        if record is None:
            yield Finding(id="hang", severity="warning", what="the record of a hang is damaged", files=(name,))
            continue
        when = time.strftime("%H:%M:%S", time.localtime(record.time))
        yield Finding(
            id="hang",
            severity="error" if seen.status in ("died", "failed") else "warning",
            what=f"at {when}: {record.text}",
            files=(name,),
        )


def _read_hang(run: RunDir, path: Path) -> _HangRecord | None:
    """Return the record of a hang; None if it is damaged."""
    try:
        found = run.read_json(_name(run, path))
        return _HangRecord(time=float(found["time"]), text=verdict_from_json(found).text)
    except (DureError, KeyError, TypeError, ValueError):
        return None


def _restarts(run: RunDir, events: list[Event]) -> Iterator[Finding]:
    restarts = [event for event in events if isinstance(event, Restarted)]
    if not restarts:
        return
    ranks = Counter(event.rank for event in restarts)
    rank, count = ranks.most_common(1)[0]
    is_one = len(restarts) > 1 and count == len(restarts)
    causes = [f"  step {event.step}: {event.message}" for event in restarts[-_MOST_CAUSES:]]
    more = [f"  … and {len(restarts) - _MOST_CAUSES} before"] if len(restarts) > _MOST_CAUSES else []
    times = "once" if len(restarts) == 1 else f"{len(restarts)} times"
    yield Finding(
        id="restarted",
        severity="warning",
        what="\n".join([f"all ranks were started again {times}", *causes, *more]),
        files=("events.jsonl",),
        remedy=f"each time it was rank {rank}: look at its device and its share of the data" if is_one else None,
    )


def _events(events: list[Event]) -> Iterator[Finding]:
    skipped = [event for event in events if isinstance(event, StepSkipped)]
    if skipped:
        yield Finding(
            id="steps_skipped",
            severity="warning",
            what=f"{len(skipped)} step(s) were left out because the loss was not finite, the first step "
            f"{skipped[0].step}: {skipped[0].message}",
            files=("events.jsonl",),
            remedy="look at these samples; a lower learning rate or --clip-norm may help",
        )
    lost = [event for event in events if isinstance(event, RankLost)]
    for event in lost:
        samples = sum(len(share.samples) for share in event.shares)
        yield Finding(
            id="rank_lost",
            severity="warning",
            what=f"rank {event.rank} was lost, and {samples} samples of its shares were not used",
            files=("events.jsonl",),
        )


def _damaged_events(events: list[Event]) -> Iterator[Finding]:
    """Yield the first event whose fields are not those of an event of its name."""
    damaged = [event for event in events if isinstance(event, UnknownEvent) and event.fault is not None]
    if damaged:
        yield Finding(
            id="damaged_events",
            severity="warning",
            what=f"{len(damaged)} event(s) cannot be read, the first, {damaged[0].name}, {damaged[0].fault}",
            files=("events.jsonl",),
            remedy="restore it from a copy of the run",
        )


def _silence(run: RunDir, seen: RunOverview) -> Iterator[Finding]:
    """Yield a finding on a running run that has not recorded a step for some time."""
    if seen.status != "running" or run.is_script:
        return
    path = run.records_path(0)
    seconds = time.time() - path.stat().st_mtime if path.is_file() else None
    if seconds is not None and seconds > _QUIET_SECONDS and not run.hangs():
        yield Finding(
            id="silent",
            severity="warning",
            what=f"it is running, but its last step was written {seconds:.0f} s ago{_last_step(seen)}",
            files=(path.name,),
            remedy="its watchdog says why after --hang-after seconds",
        )


def _last_step(seen: RunOverview) -> str:
    return f"; {seen.samples:,} samples had been seen" if seen.samples else ""
