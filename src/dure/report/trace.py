"""Timeline of a run's last steps for chrome://tracing and Perfetto, from the step records of all ranks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dure.records import events as kinds
from dure.records.events import Event
from dure.records.run_dir import RunDir, os_errors_as_sentences
from dure.records.step_columns import StepColumns, read_columns
from dure.records.step_record import PARTS
from dure.report.part_labels import PART_LABELS
from dure.report.whole_file import written_whole
from dure.terminal import printable

COLUMNS = (
    *("step", "time", "samples_seen", "loss_sum", "loss_count", "wall_seconds", "sent_bytes"),
    *(f"{part}_seconds" for part in PARTS),
)
_SHOWN = {
    kinds.CheckpointSaved: "checkpoint",
    kinds.Evaluated: "evaluation",
    kinds.Restarted: "restart",
    kinds.Hang: "hang",
    kinds.StepSkipped: "skipped step",
}
"""Names of the events that are shown as marks."""


def write_trace(run: RunDir, path: Path, num_steps: int) -> int:
    """Write the last steps of all ranks as one trace; return how many there are.

    A step of a rank is a slice that ends at the time of its record, with a slice for each part, one after another.
    Communication that computation hides is inside `forward and backward`. Ranks of several hosts have their own clocks.

    Args:
        run: Run of a task.
        path: Path of the file; an existing one is replaced.
        num_steps: Maximum number of steps.

    Raises:
        RunInvalid: The records cannot be read.
        Misuse: The file cannot be written.
    """
    with os_errors_as_sentences(run.path, "read"), run.understood():
        columns = {rank: read_columns(run.records_path(rank), COLUMNS) for rank in run.recorded_ranks()}
        events = list(run.events())
    steps = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *(each.steps for each in columns.values())]))
    steps = steps[-num_steps:]
    rows = [row for rank, each in columns.items() for row in rank_rows(rank, each, steps)]
    begin = min((row["ts"] for row in rows if "ts" in row), default=0.0)
    rows += marks(events, begin)
    for row in rows:
        if "ts" in row:  # microseconds since 1970 have no room for fractions in a browser's numbers
            row["ts"] = round(row["ts"] - begin, 3)
    with written_whole(path) as new:
        new.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}), encoding="utf-8")
    return int(steps.size)


def rank_rows(rank: int, columns: StepColumns, steps: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yield the name of a rank, its steps and their parts; times are microseconds since 1970."""
    yield {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
    yield {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
    yield {"name": "thread_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": "steps"}}
    for index in np.flatnonzero(np.isin(columns.steps, steps)):
        found = {name: float(values[index]) for name, values in columns.values.items()}
        start = found["time"] - found["wall_seconds"]
        arguments = {"samples_seen": found["samples_seen"], "sent_bytes": found["sent_bytes"]}
        if found["loss_count"]:
            arguments["loss"] = found["loss_sum"] / found["loss_count"]
        yield _slice(rank, f"step {int(found['step'])}", start, found["wall_seconds"]) | {"args": arguments}
        measured = {part: found[f"{part}_seconds"] for part in PARTS}
        other = max(0.0, found["wall_seconds"] - sum(measured.values()))
        for part, seconds in ({"other": other} | measured).items():  # the rest is before the wait for data
            if seconds > 0:
                yield _slice(rank, PART_LABELS[part], start, seconds)
            start += seconds


def _slice(rank: int, name: str, start: float, seconds: float) -> dict[str, Any]:
    return {"name": name, "ph": "X", "pid": rank, "tid": 0, "ts": 1e6 * start, "dur": round(1e6 * seconds, 3)}


def marks(events: list[Event], begin: float) -> Iterator[dict[str, Any]]:
    """Yield the events since a time, in microseconds."""
    for event in events:
        name = next((name for kind, name in _SHOWN.items() if isinstance(event, kind)), None)
        if name is not None and 1e6 * event.time >= begin:
            message = printable(str(getattr(event, "message", "")))[:200]
            place = {"pid": 0, "tid": 0, "ts": 1e6 * event.time}
            yield {"name": name, "ph": "i", "s": "g", "args": {"message": message}, **place}
