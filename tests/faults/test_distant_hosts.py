"""Two hosts far apart: what one sends is under way for 50 to 300 ms, and nothing of it is taken for a fault."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from tests.commands import Command, RunFiles
from tests.two_hosts import HEAD, OTHER, ROUNDING, Hosts, ended, last_weights

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
TRAIN = (
    "train",
    TASK,
    "--global-batch-size",
    "8",
    "--threads",
    "1",
    "--nproc",
    "1",
    "--task.num-samples",
    33,
    "--name",
)
NAMES = [f"node {rank} ({os.uname().nodename}, {address})" for rank, address in enumerate((HEAD, OTHER))]


def check_nothing_was_wrong(run: RunFiles, commands: tuple[Command, ...]) -> None:
    assert run.summary()["status"] == "completed"
    assert run.events("hang") == run.events("restart") == []
    assert not any("no step has finished" in command.err for command in commands)


def test_training_when_hosts_are_far_apart_then_it_is_as_on_one(distant: Hosts, tmp_path):
    commands = distant.both(tmp_path, *TRAIN, "run", "--epochs", 1)
    assert ended(commands, 120.0) == [0, 0], [command.err for command in commands]
    alone = distant.start(0, tmp_path, *TRAIN, "alone", "--epochs", 1, several=False)
    assert alone.wait() == 0, alone.err
    check_nothing_was_wrong(RunFiles(tmp_path / "runs/run"), commands)
    across, one = last_weights(tmp_path / "runs/run"), last_weights(tmp_path / "runs/alone")
    assert max(np.abs(across[name] - one[name]).max() for name in one) < ROUNDING


def test_host_when_it_is_cut_off_far_away_then_the_other_goes_on_and_it_comes_back(distant: Hosts, tmp_path):
    words = (*TRAIN, "run", "--epochs", 6, "--task.pause-seconds", 1.0, "--task.paused-until", tmp_path / "hurry")
    commands = tuple(distant.start(node, tmp_path, *words, nnodes="1:2") for node in range(2))
    run = RunFiles(tmp_path / "runs/run")
    commands[0].wait_for(lambda: run.records(0), "a step")
    distant.cut()
    cut_at = time.monotonic()
    commands[0].wait_for(lambda: len(run.events("nodes")) == 1, "the loss of the host")
    assert 12.0 < time.monotonic() - cut_at < 20.0
    distant.mend()
    commands[0].wait_for(lambda: len(run.events("nodes")) == 2, "its return")
    (tmp_path / "hurry").touch()
    assert ended(commands, 120.0) == [0, 0], [command.err for command in commands]
    lost, back = run.events("nodes")
    assert lost["message"].startswith(f"{NAMES[1]} is gone (nothing was heard of it for 13 s)")
    assert back["message"] == f"{NAMES[1]} is there"
    check_nothing_was_wrong(run, commands)
