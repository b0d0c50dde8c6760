"""Findings of `dure doctor` in a run's folder."""

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dure.doctor.findings import diagnose
from dure.errors import PeerLost
from dure.failures.record import failure_file, failure_to_json
from dure.failures.report import describe_failure
from dure.launch.hangs.diagnosis import explain
from dure.records.events import Attempt, Restarted, StepSkipped
from dure.records.run_dir import SCRIPT, SPEC, SUMMARY, RunDir
from dure.spec import RunSpec
from tests.launch.hangs.test_hang import call, rank


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir.create(tmp_path, "run", for_script=True)
    run.write_script({"script": "/x/train.py", "world_size": 2})
    run.append_event(Attempt())
    return run


def ended(run: RunDir, status: str, error: str | None = None) -> RunDir:
    run.write_json(SUMMARY, {"status": status, "message": error, "world_size": 2})
    return run


def found(run: RunDir) -> list[tuple[str, str]]:
    return [(finding.severity, finding.what.splitlines()[0]) for finding in diagnose(run).findings]


def test_run_when_completed_then_nothing_is_found(run):
    assert (found(ended(run, "completed")), diagnose(run).worst) == ([], None)


def test_run_when_it_died_then_says_so(run):
    ((severity, what),) = found(run)
    assert severity == "error"
    assert what.startswith("it ended without a word: its supervisor was killed")


def test_run_when_its_supervisor_died_after_a_rank_failed_then_the_rank_is_judged_from_its_own_record(run):
    for number, seconds in ((0, 2), (1, 1)):  # rank 0 only lost rank 1, and wrote that down later
        error = PeerLost("rank 1 is gone") if number == 0 else ValueError("no such thing")
        failure = replace(describe_failure(error, number, step=4), time=time.time() + seconds)
        run.write_json(failure_file(number), failure_to_json(failure))
    died, failed = found(run)
    assert died[1].startswith("it ended without a word")
    assert failed == ("error", "before that, rank 1 failed after step 4: ValueError: no such thing")


@pytest.mark.parametrize("record", [{"rank": 1}, {"rank": 1, "time": 0.0}, "no record"])
def test_run_when_it_died_and_a_failure_is_old_or_damaged_then_it_is_no_verdict(run, record):
    run.write_json("logs/failure-rank1.json", record)
    assert len(found(run)) == 1


def test_script_when_it_died_then_what_its_ranks_said_last_is_told(run):
    run.log_path(0).write_text("step 1\n\x1b[31mstep 2\x1b[0m\n\n")
    run.log_path(1).write_text("")
    finding = diagnose(run).findings[0]
    assert finding.what.splitlines()[-2:] == [
        "  only its supervisor knew whether a rank had failed before, and why; the logs of the ranks are left",
        "  rank 0 said last: step 2",
    ]
    assert finding.files == ("logs/rank0.log",)


def test_hang_when_the_launcher_ended_the_ranks_for_it_then_it_is_the_verdict(run):
    hang = explain([rank(0, call()), rank(1, call(is_pending=False), line=33)], 12.0)
    run.note_hang(hang.to_json())
    (finding,) = diagnose(ended(run, "failed", "the ranks were ended because they hung (--on-hang)")).findings
    assert finding.what == f"{hang.text}\nthe ranks were ended because they hung (--on-hang)"
    assert finding.files == ("logs/hang-1.json",)


def test_run_when_failed_then_the_verdict_comes_first_and_the_evidence_is_named(run):
    run.write_json("logs/failure-rank1.json", {"rank": 1})
    finding = diagnose(ended(run, "failed", "rank 1 failed: ValueError: no\n  train.py:3")).findings[0]
    assert finding.what == "rank 1 failed: ValueError: no\n  train.py:3"
    assert finding.files == ("logs/failure-rank1.json",)


def test_hang_then_is_told_as_it_was_with_its_file(run):
    run.note_hang(explain([rank(0, call()), rank(1, call(is_pending=False), line=33)], 12.0).to_json())
    (finding,) = diagnose(ended(run, "completed")).findings
    assert (finding.severity, finding.files) == ("warning", ("logs/hang-1.json",))
    assert "rank 1 is idle at /home/me/train.py:33 in train" in finding.what


def test_hang_when_its_record_is_damaged_then_the_rest_is_told(run):
    (run.path / "logs" / "hang-1.json").write_text('{"text": "cut o')
    assert found(ended(run, "failed", "why")) == [("error", "why"), ("warning", "the record of a hang is damaged")]


def test_restarts_when_always_of_one_rank_then_its_device_is_suspected(run):
    for number in range(1, 6):
        run.append_event(Restarted(number=number, rank=1, step=10 * number, message="rank 1 was killed"))
    (finding,) = diagnose(ended(run, "completed")).findings
    assert finding.what.splitlines()[0] == "all ranks were started again 5 times"
    assert finding.what.splitlines()[-1] == "  … and 2 before"
    assert finding.remedy is not None
    assert "each time it was rank 1" in finding.remedy


def test_steps_when_left_out_then_are_counted(run):
    for step in (3, 9):
        run.append_event(StepSkipped(step=step, message="the loss is nan: rank 0, samples [1, 2]"))
    ((_, what),) = found(ended(run, "completed"))
    assert what.startswith("2 step(s) were left out because the loss was not finite, the first step 3")


def test_hung_run_when_it_still_hangs_then_its_hang_is_told(run):
    with run.lock():
        run.note_hang(explain([rank(0, call()), rank(1, line=33)], 12.0).to_json())
        diagnosis = diagnose(run)
    assert diagnosis.status == "running"
    assert json.loads(json.dumps(diagnosis.to_json()))["findings"][0]["severity"] == "warning"


def test_run_when_its_record_is_damaged_then_is_unreadable(run):
    (run.path / SCRIPT).write_text("{")
    ((severity, what),) = found(run)
    assert severity == "error"
    assert re.fullmatch(rf"{run.path / SCRIPT} is damaged \(.*\): restore it from a copy of the run", what)
    (run.path / SCRIPT).write_text("[]")
    ((_, what),) = found(run)
    assert what.startswith(f"the records of {run.path} are damaged or of another version of dure (")


def test_run_when_its_step_records_are_noise_then_their_file_is_named(run):
    path = ended(run, "completed").records_path(0)
    path.write_bytes(bytes(range(256)) * 40)
    assert found(run) == [("warning", "rank0.jsonl is damaged: its end holds no record of a step")]
    path.write_text('{"samples_seen": 32}\n{"sam')  # a crash leaves this
    assert found(run) == []


@pytest.mark.parametrize(
    ("make", "fault"),
    [(Path.mkdir, "not a file"), (os.mkfifo, "not a file"), (Path.touch, "empty"), (lambda path: None, "missing")],
    ids=["folder", "pipe", "empty", "missing"],
)
def test_run_when_its_events_are_no_file_then_that_is_said(make, fault, run):
    ended(run, "completed").records_path(0).write_text('{"samples_seen": 32}\n')
    events = run.path / "events.jsonl"
    events.unlink(missing_ok=True)
    make(events)
    assert found(run) == [("warning", f"events.jsonl is {fault}")]


def test_run_when_it_has_ended_without_records_of_steps_then_that_is_said(tmp_path):
    run = RunDir.create(tmp_path, "task")
    run.write_json(SPEC, {"spec": RunSpec(task="-:-").model_dump(mode="json")})
    run.append_event(Attempt())
    ended(run, "completed")
    assert ("warning", "rank0.jsonl is missing, as are the records of all other ranks") in found(run)


def test_run_when_an_event_is_damaged_then_it_is_named_and_an_event_of_a_newer_dure_is_not(run):
    lines = ('{"event": "restart", "time": 1}', '{"event": "moved", "time": 1}')
    with (run.path / "events.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    ((severity, what),) = found(ended(run, "completed"))
    assert severity == "warning"
    assert what.startswith("1 event(s) cannot be read, the first, restart, holds other fields than it should (number")


def test_task_when_its_spec_is_of_another_version_then_that_is_the_finding(tmp_path):
    run = RunDir.create(tmp_path, "run")
    run.write_json(SPEC, {"spec": {"of": "another version"}})
    run.append_event(Attempt())
    (finding,) = diagnose(run).findings
    assert (finding.id, finding.severity) == ("unreadable", "error")


def test_task_when_its_speed_cannot_be_judged_then_its_failure_is_found_nevertheless(tmp_path, monkeypatch):
    def slow_findings(*_):
        raise ValueError("an odd record")

    monkeypatch.setattr("dure.doctor.findings.slow_findings", slow_findings)
    run = RunDir.create(tmp_path, "run")
    run.write_json(SPEC, {"spec": RunSpec(task="-:-").model_dump(mode="json")})
    ended(run, "failed", "rank 1 failed")
    assert [finding.id for finding in diagnose(run).findings] == ["failed", "speed_unknown"]
