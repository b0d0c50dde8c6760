"""A rank of an rpc_model run is killed, in a call or waiting for one: all end within seconds and it is named."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.commands import RunFiles
from tests.strangers import disturb

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
BASE = (
    *("train", TASK, "--strategy", "rpc_model", "--nproc", 3, "--name", "run", "--global-batch-size", 8, "--quiet"),
    *("--max-restarts", 0),
)

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_rank_when_killed_then_all_end_within_two_seconds_and_it_is_named(rank, prewarmed, tmp_path):
    command = prewarmed.start(tmp_path, *BASE, "--epochs", 50, "--task.pause-seconds", 0.01)
    run = RunFiles(tmp_path / "runs/run")
    pids = command.ranks(3)
    run.wait_for("checkpoint", command)
    os.kill(pids[rank], signal.SIGKILL)
    assert command.wait(seconds=2) == 1
    assert f"dure: rank {rank} was killed (SIGKILL)" in command.err.replace("\n", " ")


@pytest.mark.parametrize("rank", ["all", 2])
def test_rank_when_asked_to_stop_then_all_stop_at_one_step_and_go_on_later(rank, prewarmed, tmp_path):
    command = prewarmed.start(tmp_path, *BASE, "--epochs", 8, "--task.pause-seconds", 0.01)
    run = RunFiles(tmp_path / "runs/run")
    pids = command.ranks(3)
    run.wait_for("checkpoint", command)
    if rank == "all":
        command.send(signal.SIGTERM)
    else:
        os.kill(pids[rank], signal.SIGTERM)
    assert command.wait() == 143, command.err
    assert len({len(run.records(rank)) for rank in range(3)}) == 1
    assert prewarmed.run(tmp_path, "train", "--resume", "runs/run", "--quiet").code == 0
    assert run.summary()["samples"] == 8 * 97


def test_strangers_when_they_come_to_every_port_then_the_run_goes_on_and_agents_have_none(prewarmed, tmp_path):
    command = prewarmed.start(tmp_path, *BASE, "--epochs", 8, "--task.pause-seconds", 0.03)
    run = RunFiles(tmp_path / "runs/run")
    run.wait_for("checkpoint", command)
    stay = disturb(psutil.Process(command.pid))
    code = command.wait()
    for connection in stay:
        connection.close()
    assert code == 0, command.err
    assert 0 < len(stay) <= 4  # the store, and a group of gloo on each rank
    assert run.summary()["samples"] == 8 * 97
