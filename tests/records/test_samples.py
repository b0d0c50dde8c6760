"""Records of runs that an older dure made, before records had versions: kept as files, and read as those of today."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from dure.failures.record import CodeLine, failure_from_json, failure_to_json, read_failure
from dure.records.events import EVENTS, Evaluated, UnknownEvent, event_from_json, event_to_json
from dure.records.run_dir import RunDir
from dure.records.run_list import list_runs
from dure.records.step_record import RunSummary, step_from_json, step_line
from dure.report.summary import summarise

RUNS = Path(__file__).parents[1] / "samples" / "run_folders"
FAILURES = sorted(RUNS.glob("*/logs/failure-rank*.json"))
NAMES = [f"{path.parts[-3]} {path.stem}" for path in FAILURES]


@pytest.mark.parametrize("path", FAILURES, ids=NAMES)
def test_failure_when_it_is_written_again_then_only_what_was_not_recorded_is_new(path: Path) -> None:
    found = json.loads(path.read_text())
    assert "version" not in found
    unknown = {"collective": None, "handled": (), "is_after_loss": False, "has_timed_out": False, "left_group_at": None}
    assert failure_to_json(failure_from_json(found)) == {"version": 1, **unknown, **found}


def test_failures_when_read_then_their_kinds_are_those_that_runs_ended_with() -> None:
    raised, only_lost = read_failure(RUNS / "raised", 1), read_failure(RUNS / "raised", 0)
    assert raised is not None
    assert only_lost is not None
    assert (raised.type, raised.message, raised.origin) == ("ValueError", "a planned failure", "task")
    text = 'raise ValueError("a planned failure")'
    assert raised.user_line == CodeLine(file="/home/user/tests/faulty_task.py", line=24, function="fail", text=text)
    assert (only_lost.is_consequence, raised.is_consequence) == (True, False)
    script = read_failure(RUNS / "script_raises", 1)
    assert script is not None
    assert script.collective == "all_reduce #3 of [1] float"


LINES = [
    pytest.param(json.loads(line), id=f"{path.parent.name} {number}")
    for path in sorted(RUNS.glob("*/events.jsonl"))
    for number, line in enumerate(path.read_text().splitlines(), 1)
]


@pytest.mark.parametrize("found", LINES)
def test_event_when_it_is_written_again_then_only_the_version_is_new(found: dict[str, Any]) -> None:
    event = event_from_json(found)
    assert type(event) is EVENTS[found["event"]]
    assert json.loads(json.dumps(event_to_json(event))) == {"version": 1, **found}


def test_events_when_all_samples_are_read_then_nearly_every_kind_is_among_them() -> None:
    kinds = {type(event) for path in RUNS.iterdir() for event in RunDir(path).events()}
    assert UnknownEvent not in kinds
    missing = {name for name, kind in EVENTS.items() if kind not in kinds}
    assert missing <= {"slow_threads", "not_preserved", "warning", "factors_used"}


def test_evaluations_when_read_then_counts_are_whole_numbers_still() -> None:
    evaluated = next(event for event in RunDir(RUNS / "resumed").events() if isinstance(event, Evaluated))
    assert {type(metric.count) for metric in evaluated.metrics.values()} == {int}


STEPS = [path for path in sorted(RUNS.glob("*/rank*.jsonl")) if path.stat().st_size]


@pytest.mark.parametrize("path", STEPS, ids=lambda path: f"{path.parent.name} {path.stem}")
def test_steps_when_written_again_then_only_the_version_is_new(path: Path) -> None:
    for line in path.read_text().splitlines():
        assert json.loads(step_line(step_from_json(json.loads(line)))) == {"version": 1, **json.loads(line)}


SUMMARIES = [path for path in sorted(RUNS.glob("*/summary.json")) if not path.parent.name.startswith("script")]


@pytest.mark.parametrize("path", SUMMARIES, ids=lambda path: path.parent.name)
def test_summary_when_it_is_made_again_from_the_records_then_it_is_the_same(path: Path) -> None:
    found, run = json.loads(path.read_text()), RunDir(path.parent)
    # the run folder adds it to the summary; samples from before do not have it
    assert found.pop("attempts", run.num_attempts()) == run.num_attempts()
    summary = RunSummary.from_json(found)
    assert summary.to_json() == {"version": 1, **found}
    again = summarise(run, run.read_spec(), summary.status, summary.message)
    assert {**again.to_json(), "run": summary.run} == summary.to_json()


def test_runs_when_listed_then_each_ended_as_it_did(tmp_path: Path) -> None:
    shutil.copytree(RUNS, tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("*/summary.json"):
        os.utime(path, (2**32, 2**32))  # a summary that is older than the last attempt counts for none
    found = {run.name: run.status for run in list_runs(tmp_path)}
    assert "unreadable" not in found.values()
    ends = {"raised": "failed", "script_leaves": "failed", "stopped": "interrupted", "lost": "completed"}
    assert {name: found[name] for name in ends} == ends
