"""Ctrl-Z and `fg`: a run stands still and goes on as if nothing had been, whatever its ranks were at."""

import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.commands import Command, Prewarmed, RunFiles, wait_until

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
TRAIN = (
    "train",
    TASK,
    "--nproc",
    2,
    "--global-batch-size",
    8,
    "--epochs",
    1,
    "--name",
    "run",
    "--task.pause-seconds",
    0.02,
)
LIMITS = ("--hang-after", 3, "--timeout-seconds", 3, "--max-restarts", 0)
PAUSE_SECONDS = 4.0
"""Time that the run stands still: over every limit in `LIMITS`, and under the gap that tells a frozen host."""

WAYS = [pytest.param(True, id="terminal"), pytest.param(False, id="kill", marks=pytest.mark.faults)]


def statuses(command: Command) -> set[str]:
    return {process.status() for process in command.processes()}


def pause(command: Command, *, all_of_it: bool, seconds: float = PAUSE_SECONDS) -> None:
    """Stop a run as a terminal or as `kill` does, and let it go on after a while."""
    send = command.send_to_all if all_of_it else command.send
    ranks = [psutil.Process(pid) for pid in command.ranks(2)]
    send(signal.SIGTSTP)
    everyone = [psutil.Process(command.pid), *ranks]
    wait_until(lambda: all(one.status() == psutil.STATUS_STOPPED for one in everyone), "all to stand still", 5.0)
    time.sleep(seconds)
    send(signal.SIGCONT)
    wait_until(lambda: psutil.STATUS_STOPPED not in statuses(command), "all to go on", 5.0)


def check_undisturbed(command: Command, run: RunFiles) -> None:
    assert command.wait() == 0, command.err
    assert run.summary()["status"] == "completed"
    assert run.events("hang") == run.events("restart") == []


@pytest.mark.parametrize("all_of_it", WAYS)
def test_run_when_it_is_paused_before_the_first_heartbeat_then_it_goes_on(all_of_it, prewarmed: Prewarmed, tmp_path):
    command = prewarmed.start(tmp_path, *TRAIN, *LIMITS[2:], "--task.prepare-seconds", 0.5)
    command.wait_for((tmp_path / "preparing").exists, "the preparation")
    pause(command, all_of_it=all_of_it, seconds=1.0)
    check_undisturbed(command, RunFiles(tmp_path / "runs/run"))


@pytest.mark.parametrize("all_of_it", WAYS)
def test_run_when_it_is_paused_for_longer_than_all_limits_then_it_goes_on(all_of_it, prewarmed: Prewarmed, tmp_path):
    command, run = prewarmed.start(tmp_path, *TRAIN, *LIMITS), RunFiles(tmp_path / "runs/run")
    run.wait_for("training", command)
    pause(command, all_of_it=all_of_it)
    check_undisturbed(command, run)


@pytest.mark.faults
def test_run_when_it_is_paused_for_longer_than_gloos_timeout_then_it_goes_on(prewarmed: Prewarmed, tmp_path):
    command = prewarmed.start(tmp_path, *TRAIN, *LIMITS[:4], "--backend", "gloo")
    run = RunFiles(tmp_path / "runs/run")
    run.wait_for("training", command)
    pause(command, all_of_it=True)
    assert command.wait() == 0, command.err
    assert run.summary()["status"] == "completed"
    # gloo counts the pause: if a rank was waiting in a collective, all are started again
    assert len(run.events("restart")) <= 1
