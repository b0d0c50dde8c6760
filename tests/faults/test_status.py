"""`dure runs` tells how each run ended."""

import json
import signal
from pathlib import Path

import pytest

from tests.commands import RunFiles

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
BASE = ("train", TASK, "--nproc", 2, "--global-batch-size", 8, "--quiet", "--epochs", 1)
SLOW = ("--task.pause-seconds", 0.05)


def listed(prewarmed, folder: Path) -> dict[str, str]:
    command = prewarmed.run(folder, "runs", "--json")
    assert command.code == 0, command.err
    return {run["name"]: run["status"] for run in json.loads(command.out)["runs"]}


@pytest.mark.faults
def test_status_when_runs_end_in_every_way_then_each_is_told(prewarmed, tmp_path):
    assert prewarmed.run(tmp_path, *BASE, "--name", "completed").code == 0
    assert prewarmed.run(tmp_path, *BASE, "--name", "failed", "--task.fault", "raise").code == 1
    for name, number in (("interrupted", signal.SIGINT), ("died", signal.SIGKILL)):
        command = prewarmed.start(tmp_path, *BASE, *SLOW, "--name", name)
        RunFiles(tmp_path / "runs" / name).wait_for("training", command)
        command.send_to_all(number)
        command.wait()
    command = prewarmed.start(tmp_path, *BASE, *SLOW, "--name", "running")
    RunFiles(tmp_path / "runs/running").wait_for("training", command)
    statuses = listed(prewarmed, tmp_path)
    assert command.wait() == 0
    assert all(name == status for name, status in statuses.items())
    assert len(statuses) == 5
    assert listed(prewarmed, tmp_path)["running"] == "completed"


@pytest.mark.faults
def test_status_when_a_run_that_failed_is_resumed_then_it_counts_anew(prewarmed, tmp_path):
    size = ("--task.num-samples", 800, "--checkpoint.every-samples", 8)
    flags = (*BASE, *SLOW, "--name", "run", *size)
    command = prewarmed.start(tmp_path, *flags)
    run = RunFiles(tmp_path / "runs/run")
    run.wait_for("checkpoint", command)
    command.send_to_all(signal.SIGTERM)
    command.wait()
    assert listed(prewarmed, tmp_path) == {"run": "interrupted"}
    command = prewarmed.start(tmp_path, "train", "--resume", run.path)
    command.wait_for(lambda: len(run.events("training")) == 2, "training")
    assert listed(prewarmed, tmp_path) == {"run": "running"}
    assert command.code is None
    assert prewarmed.run(tmp_path, "train", "--resume", run.path).code == 2  # one at a time
    command.send_to_all(signal.SIGKILL)
    command.wait()
    assert listed(prewarmed, tmp_path) == {"run": "died"}
    assert prewarmed.run(tmp_path, "train", "--resume", run.path).code == 0
    assert listed(prewarmed, tmp_path) == {"run": "completed"}
