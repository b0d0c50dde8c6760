"""Timelines of a run's last steps."""

import json
from pathlib import Path

import pytest

from dure.cli.app import main
from dure.records.events import Evaluated, Restarted
from dure.records.run_dir import RunDir
from dure.records.step_record import step_line
from dure.report.trace import write_trace
from tests.record_cases import step_of

SAMPLES = Path(__file__).parents[1] / "samples" / "run_folders"


@pytest.fixture
def run(tmp_path):
    (tmp_path / "spec.json").write_text("{}")
    run = RunDir(tmp_path)
    for rank in range(2):
        steps = [step_of(step=step, time=1.75e9 + step + rank / 8, wall_seconds=0.5, data_seconds=0.125,
                         forward_backward_seconds=0.125, sync_seconds=0.0, optimizer_seconds=0.125)
                 for step in range(1, 5)]  # fmt: skip
        run.records_path(rank).write_text("".join(map(step_line, steps)))
    return run


def test_steps_have_their_parts_one_after_another_on_one_clock(run, tmp_path):
    assert write_trace(run, tmp_path / "t.json", 2) == 2
    rows = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    slices = [(row["pid"], row["name"], row["ts"] / 1e6, row["dur"] / 1e6) for row in rows if row["ph"] == "X"]
    assert slices[:5] == [
        (0, "step 3", 0.0, 0.5),
        (0, "other", 0.0, 0.125),
        (0, "waiting for data", 0.125, 0.125),
        (0, "forward and backward", 0.25, 0.125),
        (0, "optimiser", 0.375, 0.125),
    ]
    assert [row for row in slices if row[:2] == (1, "step 4")] == [(1, "step 4", 1.125, 0.5)]
    assert [row["args"]["name"] for row in rows if row["name"] == "process_name"] == ["rank 0", "rank 1"]


def test_events_of_these_steps_are_marks(run, tmp_path):
    at = {"step": 3, "samples_seen": 1, "epochs": 1.0, "train_loss": None, "seconds": 1.0, "seconds_since_last": 1.0}
    run.append_event(Evaluated(time=1.75e9, metrics={}, is_best=False, best_metric="loss", **at))
    run.append_event(Restarted(time=1.75e9 + 4, number=1, rank=0, step=3, message="\x1b]0;taken\x07"))
    write_trace(run, tmp_path / "t.json", 2)
    marks = [row for row in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if row["ph"] == "i"]
    assert [(row["name"], row["ts"]) for row in marks] == [("restart", 1.5e6)]
    assert "\x1b" not in marks[0]["args"]["message"]


def test_run_without_records_has_an_empty_timeline(tmp_path):
    (tmp_path / "spec.json").write_text("{}")
    assert write_trace(RunDir(tmp_path), tmp_path / "t.json", 5) == 0


def test_command_writes_a_timeline(tmp_path, capsys):
    assert main(["export-records", str(SAMPLES / "resumed"), str(tmp_path / "t.json")]) == 0
    assert "open it in ui.perfetto.dev" in capsys.readouterr().out
    assert main(["export-records", str(SAMPLES / "resumed"), str(tmp_path / "t.json"), "--steps", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_steps"] == 1
    assert main(["export-records", str(SAMPLES / "resumed"), str(tmp_path / "t.json"), "--steps", "0"]) == 2
