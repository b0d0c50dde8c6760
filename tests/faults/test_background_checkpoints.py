"""Checkpoints that are written beside training: slow disks, bad disks, full disks, kills, and the end of the run."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import dure
from dure.training.checkpoints import rank_shard as checkpoint_share
from dure.training.checkpoints.reader import verify
from tests.commands import Command, RunFiles
from tests.faults.test_kill_and_resume import weights

TASK = f"{Path(__file__).parents[1] / 'disk_task.py'}:OnBadDisk"
BATCH, SAMPLES = 8, 97
BASE = ("train", TASK, "--global-batch-size", BATCH, "--name", "run", "--quiet")
TWO = (*BASE, "--nproc", 2)
EVERY = ("--checkpoint.every-samples", 24, "--checkpoint.keep", 99)
SLOW = ("--task.write-seconds", 0.05)
PACED = ("--task.pause-seconds", 0.02)


def all_good(run: RunFiles) -> list[str]:
    """Check every byte of every checkpoint and return their names; nothing else may be there."""
    names = run.checkpoints()
    for name in names:
        verify(run.path / "checkpoints" / name)
    assert not list(run.path.glob("checkpoints/.*"))
    return names


def at(*samples: int) -> list[str]:
    return [f"samples-{seen:012d}" for seen in samples]


def stopped(command: Command, run: RunFiles, send: Callable[[Command], None]) -> int:
    """Send something while a checkpoint is being written, and wait for the end."""
    command.wait_for(lambda: list(run.path.glob("checkpoints/.writing-*/*.safetensors")), "a file of a checkpoint")
    send(command)
    return command.wait()


@pytest.mark.faults
def test_run_when_the_disk_is_slow_then_each_checkpoint_is_there_at_exit(prewarmed, tmp_path):
    command = prewarmed.run(tmp_path, *TWO, *EVERY, *SLOW, *PACED, "--samples", 145)
    assert command.code == 0, command.err
    run = RunFiles(tmp_path / "runs/run")
    saves = run.events("checkpoint")
    assert all_good(run) == at(*(event["samples_seen"] for event in saves))
    assert [event["samples_seen"] for event in saves] == [24, 48, 72, 96, 97, 121, 145]
    # two that are due in one step wait for each other; one with a few steps behind it does not take them, though each
    # by itself may be held up by a machine that has other things to do
    assert min(event["stall_seconds"] for event in saves[:3]) < saves[3]["stall_seconds"]
    assert all(event["write_seconds"] > 0.15 for event in saves)
    stalls = sum(event["stall_seconds"] for event in saves)
    assert run.summary()["seconds"]["checkpoint"] == pytest.approx(stalls)


@pytest.mark.faults
def test_run_when_checkpoints_are_not_to_be_asynchronous_then_training_waits_for_each(prewarmed, tmp_path):
    command = prewarmed.run(tmp_path, *TWO, *EVERY, *SLOW, "--no-checkpoint.background", "--samples", 72)
    assert command.code == 0, command.err
    saves = RunFiles(tmp_path / "runs/run").events("checkpoint")
    assert [event["stall_seconds"] >= event["write_seconds"] for event in saves] == [True] * 3


@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, 1])
def test_run_when_the_disk_refuses_a_checkpoint_then_all_ranks_end_at_the_next_step_and_say_why(
    rank, prewarmed, tmp_path
):
    bad = ("--task.bad-rank", rank, "--task.bad-save", 2)
    command = prewarmed.run(tmp_path, *TWO, *EVERY, *PACED, *bad, "--epochs", 2)
    run = RunFiles(tmp_path / "runs/run")
    assert command.code == 1, command.err
    assert command.err.startswith("dure: the checkpoint at 48 samples could not be written to ")
    assert "Input/output error" in command.err
    assert command.err.count("\n") <= 2, command.err
    assert all_good(run) == at(24)
    assert {len(run.records(0)), len(run.records(1))} in ({7}, {8})  # the save was after the sixth step


@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, 1])
def test_run_when_the_disk_is_full_for_a_while_then_it_goes_on_and_warns_once(rank, prewarmed, tmp_path):
    bad = ("--task.bad-rank", rank, "--task.bad-save", 2, "--task.good-save", 4, "--task.reason", "ENOSPC")
    command = prewarmed.run(tmp_path, *TWO, *EVERY, *PACED, *bad, "--samples", 145)
    run = RunFiles(tmp_path / "runs/run")
    assert command.code == 0, command.err
    (line,) = command.err.splitlines()
    assert line.startswith("dure: a checkpoint needs 1.")
    assert " free)" in line
    assert line.endswith("; training goes on, and the next checkpoint is tried again")
    assert all_good(run) == at(24, 96, 97, 121, 145)
    assert run.summary()["samples"] == 145


@pytest.mark.faults
def test_run_when_the_disk_is_full_for_the_last_checkpoint_then_it_does_not_end_well(prewarmed, tmp_path):
    bad = ("--task.bad-save", 2, "--task.reason", "ENOSPC")
    command = prewarmed.run(tmp_path, *TWO, *EVERY, *bad, "--samples", 72)
    run = RunFiles(tmp_path / "runs/run")
    assert command.code == 2, command.err
    assert "found no space left" in command.err.splitlines()[-1]
    assert all_good(run) == at(24)


@pytest.mark.faults
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 75)])
def test_run_when_asked_to_stop_while_a_checkpoint_is_written_then_both_are_there(number, code, prewarmed, tmp_path):
    command = prewarmed.start(tmp_path, *TWO, *EVERY, *SLOW, *PACED, "--epochs", 9)
    run = RunFiles(tmp_path / "runs/run")
    assert stopped(command, run, lambda command: command.send(number)) == code
    first, *_, last = all_good(run)
    assert [first, last] == at(24, run.records(0)[-1]["samples_seen"])


@pytest.mark.faults
def test_run_when_it_fails_while_a_checkpoint_is_written_then_that_is_completed(prewarmed, tmp_path):
    fault = ("--task.place", "loss", "--task.fault", "raise", "--task.rank", 1, "--task.step", 5)
    command = prewarmed.run(tmp_path, *TWO, *EVERY, *SLOW, *fault, "--max-restarts", 0)
    assert command.code == 1
    assert "rank 1 failed after step 4: ValueError: a planned failure" in command.err
    assert all_good(RunFiles(tmp_path / "runs/run")) == at(24)


@pytest.mark.faults
def test_run_when_all_is_killed_while_a_checkpoint_is_written_then_the_one_before_is_used(prewarmed, tmp_path):
    command = prewarmed.start(tmp_path, *TWO, *EVERY, *SLOW, *PACED, "--epochs", 1)
    run = RunFiles(tmp_path / "runs/run")
    run.wait_for("checkpoint", command)
    assert stopped(command, run, lambda command: command.send_to_all(signal.SIGKILL)) == -signal.SIGKILL
    assert run.checkpoints() == at(24)
    again = prewarmed.run(tmp_path, "train", "--resume", run.path)
    assert again.code == 0, again.err
    assert run.events("resumed")[0]["samples_seen"] == 24
    all_good(run)


@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_when_killed_while_the_best_is_written_then_the_run_ends_as_if_it_never_was(rank, prewarmed, tmp_path):
    (tmp_path / "whole").mkdir()
    assert prewarmed.run(tmp_path / "whole", *TWO, "--epochs", 2).code == 0
    command = prewarmed.start(tmp_path, *TWO, *SLOW, *PACED, "--epochs", 2)
    pids = command.ranks(2)
    run = RunFiles(tmp_path / "runs/run")
    assert stopped(command, run, lambda command: os.kill(pids[rank], signal.SIGKILL)) == 0
    assert len(run.events("restart")) == 1
    all_good(run)
    best = run.summary()["best"]
    assert best["checkpoint"] in run.checkpoints()
    expected = weights(prewarmed, tmp_path / "whole")
    found = weights(prewarmed, tmp_path)
    assert all((found[name] == tensor).all() for name, tensor in expected.items())


@pytest.mark.faults
@pytest.mark.parametrize(("step", "best", "is_lost"), [(14, 97, False), (17, 194, True)])
def test_rank_when_killed_while_the_best_is_written_then_it_is_saved_again_or_declared(
    step, best, is_lost, prewarmed, tmp_path
):
    # of two losses the first is the better one; a step after it its weights are still in memory, and later they are not
    slow = ("--task.write-seconds", 0.3, *PACED, "--snapshot-every", 1)
    (tmp_path / "faults.toml").write_text(f'[[fault]]\nrank = 1\nstep = {step}\nkind = "kill"\n')
    command = prewarmed.run(tmp_path, *TWO, *slow, "--epochs", 2, "--faults", tmp_path / "faults.toml")
    assert command.code == 0, command.err
    run = RunFiles(tmp_path / "runs/run")
    assert len(run.events("restart")) == 1
    assert (run.summary()["best"]["samples_seen"], f"samples-{best:012d}" in all_good(run)) == (best, True)
    declared = [text for text in run.summary()["not_preserved"] if text.startswith("the best checkpoint")]
    assert bool(declared) == is_lost


@pytest.mark.faults
def test_worker_at_its_own_pace_when_killed_while_a_checkpoint_is_written_then_the_others_save_without_it(
    prewarmed, tmp_path
):
    options = ("--no-parameter-server.sync", "--parameter-server.servers", 1)
    strategy = ("--strategy", "parameter_server", *options, "--max-restarts", 0)
    command = prewarmed.start(tmp_path, *TWO, *EVERY, *SLOW, *PACED, *strategy, "--epochs", 1)
    pids = command.ranks(3)
    run = RunFiles(tmp_path / "runs/run")
    assert stopped(command, run, lambda command: os.kill(pids[1], signal.SIGKILL)) == 0
    assert all_good(run)[-1:] == at(SAMPLES)
    assert [event["rank"] for event in run.events("rank_lost")] == [1]


@pytest.mark.faults
def test_run_in_this_process_when_it_ends_then_no_thread_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_share, "write_new_file", checkpoint_share.write_new_file)  # the task changes it
    before = set(threading.enumerate())
    begun = time.monotonic()
    settings = {"checkpoint": {"every_samples": 24, "keep": 99}, "quiet": True, "start": "inline", "threads": 1}
    summary = dure.train(
        TASK, task_options={"write_seconds": 0.05}, global_batch_size=BATCH, runs_dir=tmp_path, **settings
    )
    assert time.monotonic() - begun < 20
    assert set(threading.enumerate()) == before
    assert all_good(RunFiles(Path(summary.run))) == at(24, 48, 72, 96, 97)
