"""Trace of all ranks on one clock: their steps from the records, and what torch.profiler saw on each.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
"""

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dure.documents import DocumentInvalid, parse_json, read_json
from dure.own_files import open_own
from dure.records.rank_profiles import PROFILES, TRACE, facts_path, operators_path
from dure.records.run_dir import RunDir, os_errors_as_sentences
from dure.records.step_columns import StepColumns, read_columns
from dure.report.trace import COLUMNS, marks, rank_rows
from dure.report.whole_file import written_whole
from dure.terminal import printable

_MOST_EVENTS = 300_000
"""Operators of a rank in the trace, the first ones: a browser shows few million events."""
_MOST_BYTES = 2**30
"""Bytes of a rank's uncompressed operators that are read."""
_FLOW_IDS = 2**32
_PHASES = frozenset("XBEsftiCM")
_MOST_NAME = 300
_MOST_OFFSETS = 1_000


@dataclass(frozen=True, kw_only=True)
class Merged:
    """Contents of a merged trace."""

    ranks: tuple[int, ...]
    """Ranks with steps."""
    ranks_with_operators: tuple[int, ...]
    num_steps: int
    num_left_out: int
    """Operators that were left out because there were too many."""
    offset_seconds: Mapping[int, float]
    """Seconds by which the clock of a rank on another host than rank 0 was ahead; its events were moved by them."""
    faults: Mapping[int, str]
    """Reasons why a rank has no operators."""


def has_profiles(run: RunDir) -> bool:
    """Return whether ranks of a run have written profiles."""
    return any((run.path / PROFILES).glob("rank*-facts.json"))


def is_trace_due(run: RunDir) -> bool:
    """Return whether there are profiles that are newer than the trace, or not in one."""
    profiles = [path.stat().st_mtime for path in (run.path / PROFILES).glob("rank*")]
    trace = run.path / TRACE
    return bool(profiles) and not (trace.is_file() and trace.stat().st_mtime >= max(profiles))


def merge_profiles(run: RunDir) -> Merged:
    """Write the profiles of all ranks, and the steps of those that have none, as one trace into the run folder.

    Raises:
        RunInvalid: The records cannot be read.
        Misuse: The trace cannot be written.
    """
    with os_errors_as_sentences(run.path, "read"), run.understood():
        columns = {rank: read_columns(run.records_path(rank), COLUMNS) for rank in run.recorded_ranks()}
        events = list(run.events())
    facts = {rank: _facts(run, rank) for rank in columns}
    steps = np.unique([step for each in facts.values() for step in each["steps"]]).astype(np.int64)
    offsets = _offsets(columns, {rank: each["host"] for rank, each in facts.items()})
    begin = _begin(columns, steps, offsets)
    with_operators, num_left_out = [], 0
    with (
        written_whole(run.path / TRACE) as new,
        open(new, "wb", opener=open_own) as whole,
        gzip.open(whole, "wt", encoding="utf-8", compresslevel=4) as file,
    ):
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        separator = ""
        for rank, each in columns.items():
            rows = [*rank_rows(rank, each, steps)]
            _shift(rows, begin + 1e6 * offsets.get(rank, 0.0))
            operators, left_out = _operators(run, rank, begin + 1e6 * offsets.get(rank, 0.0))
            num_left_out += left_out
            if operators:
                with_operators.append(rank)
            if offsets.get(rank):
                text = f"clock moved by {-1e3 * offsets[rank]:.1f} ms"
                rows.append({"name": "process_labels", "ph": "M", "pid": rank, "tid": 0, "args": {"labels": text}})
            for row in rows + operators:
                file.write(separator + json.dumps(row))
                separator = ",\n"
        for row in _shift([*marks(events, begin)], begin):
            file.write(separator + json.dumps(row))
            separator = ",\n"
        file.write("\n]}\n")
    return Merged(
        ranks=tuple(columns),
        ranks_with_operators=tuple(with_operators),
        num_steps=int(steps.size),
        num_left_out=num_left_out,
        offset_seconds={rank: seconds for rank, seconds in offsets.items() if seconds},
        faults={rank: each["fault"] for rank, each in facts.items() if each["fault"]},
    )


def _facts(run: RunDir, rank: int) -> dict[str, Any]:
    """Return the facts about a rank's profile; those of a rank that died before it wrote them are empty."""
    nothing: dict[str, Any] = {"steps": [], "host": None, "fault": "it ended before its profile was written"}
    try:
        found = read_json(facts_path(run.path, rank))
    except (DocumentInvalid, OSError):
        return nothing
    if not isinstance(found, dict) or not isinstance(found.get("steps"), list):
        return nothing
    fault, host = found.get("fault"), found.get("host")
    return {
        "steps": [step for step in found["steps"] if isinstance(step, int) and 0 <= step < 2**53],
        "host": host if isinstance(host, str) else None,
        "fault": printable(fault)[:_MOST_NAME] if isinstance(fault, str) else None,
    }


def _offsets(columns: Mapping[int, StepColumns], hosts: Mapping[int, str | None]) -> dict[int, float]:
    """Return by how many seconds the clock of each rank is ahead of that of the first one.

    Ranks of one host have one clock. Ranks of several end a step together, when gradients are reduced, so the median
    difference of these ends is that of the clocks.
    """
    first = next(iter(columns), None)
    if first is None:
        return {}
    ends = {rank: dict(zip(each.values["step"], each.values["time"], strict=True)) for rank, each in columns.items()}
    by_host: dict[str | None, float] = {hosts[first]: 0.0, None: 0.0}
    offsets = {}
    for rank, host in hosts.items():
        if host not in by_host:
            common = sorted(ends[rank].keys() & ends[first].keys())[-_MOST_OFFSETS:]
            differences = [ends[rank][step] - ends[first][step] for step in common]
            by_host[host] = float(np.median(differences)) if differences else 0.0
        offsets[rank] = by_host[host]
    return offsets


def _begin(columns: Mapping[int, StepColumns], steps: np.ndarray, offsets: Mapping[int, float]) -> float:
    """Return the time at which the trace begins, in microseconds of the first rank's clock."""
    begins = [
        float((each.values["time"] - each.values["wall_seconds"])[np.isin(each.steps, steps)].min()) - offsets[rank]
        for rank, each in columns.items()
        if np.isin(each.steps, steps).any()
    ]
    return 1e6 * min(begins, default=0.0)


def _shift(rows: list[dict[str, Any]], begin: float) -> list[dict[str, Any]]:
    for row in rows:
        if "ts" in row:  # microseconds since 1970 have no room for fractions in a browser's numbers
            row["ts"] = round(max(0.0, row["ts"] - begin), 3)
    return rows


def _operators(run: RunDir, rank: int, begin: float) -> tuple[list[dict[str, Any]], int]:
    """Return a rank's operators under its own number, in the order of their times, and how many were left out."""
    found = _read(operators_path(run.path, rank))
    base, events = found.get("baseTimeNanoseconds", 0), found.get("traceEvents")
    if not isinstance(events, list) or not _is_number(base):
        return [], 0
    threads = _Threads(rank)
    rows = []
    for event in events:
        row = _row(event, base / 1e3 - begin, threads) if isinstance(event, dict) else None
        if row is not None:
            rows.append(row)
    rows.sort(key=lambda row: (row["ts"], -row.get("dur", 0.0)))
    return [*threads.named(), *rows[:_MOST_EVENTS]], max(0, len(rows) - _MOST_EVENTS)


def _read(path: Path) -> dict[str, Any]:
    """Return what torch.profiler wrote; nothing from a file that is damaged, too large, or not there."""
    try:
        with gzip.open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
        # torch writes bytes of names as they are, and they may be those of a file of any encoding
        text = data.decode("utf-8", "replace")
        found = parse_json(text, may_repeat_keys=True, most_depth=None) if len(data) <= _MOST_BYTES else None
    except (OSError, EOFError, zlib.error, ValueError, DocumentInvalid):
        return {}
    return found if isinstance(found, dict) else {}


def _row(event: Mapping[str, Any], shift: float, threads: "_Threads") -> dict[str, Any] | None:
    """Return an event of torch.profiler as one of the trace; None for one that says nothing about the rank."""
    phase, name, ts = event.get("ph"), event.get("name"), event.get("ts")
    if phase == "M":
        threads.note_name(event)
        return None
    # without a process: torch's own spans, such as the profiler's; before the begin: what the profiler itself does
    if phase not in _PHASES or not isinstance(event.get("pid"), int) or not isinstance(name, str) or not _is_number(ts):
        return None
    start, duration = float(ts) + shift, event.get("dur", 0.0)  # type: ignore[arg-type]
    if start < 0 or not _is_number(duration) or duration < 0:
        return None
    row: dict[str, Any] = {
        "name": printable(name)[:_MOST_NAME],
        "ph": phase,
        "pid": threads.rank,
        "tid": threads.number(event),
        "ts": round(start, 3),
    }
    if phase == "X":
        row["dur"] = duration
    if isinstance(event.get("cat"), str):
        row["cat"] = printable(event["cat"])[:_MOST_NAME]
    if phase in "sft":
        row["id"] = threads.rank * _FLOW_IDS + zlib.crc32(str(event.get("id")).encode(errors="replace"))
        if event.get("bp") == "e":
            row["bp"] = "e"
    if isinstance(event.get("args"), dict):
        row["args"] = event["args"]
    return row


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class _Threads:
    """Threads and streams of a rank, numbered from 1; 0 is the row of its steps."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._numbers: dict[tuple[Any, Any], int] = {}
        self._names: dict[tuple[Any, Any], str] = {}

    def number(self, event: Mapping[str, Any]) -> int:
        """Return the number of an event's thread."""
        return self._numbers.setdefault((event["pid"], str(event.get("tid"))), len(self._numbers) + 1)

    def note_name(self, event: Mapping[str, Any]) -> None:
        """Note the name of a thread, if the event has one."""
        arguments = event.get("args")
        if event.get("name") == "thread_name" and isinstance(arguments, dict):
            self._names[event.get("pid"), str(event.get("tid"))] = printable(str(arguments.get("name")))[:_MOST_NAME]

    def named(self) -> Iterator[dict[str, Any]]:
        """Yield the names of the threads that have events."""
        for key, number in self._numbers.items():
            is_main = key[0] > 0 and str(key[0]) == key[1]  # process 0 is device 0, and its threads are streams
            name = "main thread" if is_main else self._names.get(key, f"thread {key[1]}")
            place = {"pid": self.rank, "tid": number, "ts": 0}
            yield {"name": "thread_name", "ph": "M", **place, "args": {"name": name}}
            yield {"name": "thread_sort_index", "ph": "M", **place, "args": {"sort_index": number}}
