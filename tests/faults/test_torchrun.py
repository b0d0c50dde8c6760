"""Under torchrun: its ranks, one run folder, its exit codes, its signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.commands import RunFiles, wait_until

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
BASE = ("train", TASK, "--global-batch-size", "8", "--epochs", "2", "--quiet", "--name", "run", "--record-samples")

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]


def torchrun(folder: Path, *flags: object, nproc: int = 2) -> "subprocess.Popen[str]":
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(nproc),
        "-m",
        "dure",
    ]
    return subprocess.Popen(
        [*words, *map(str, flags)],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},  # torchrun leaves a folder of logs there
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_torchrun_when_it_starts_two_ranks_then_they_are_one_run(tmp_path):
    command = torchrun(tmp_path, *BASE)
    _, err = command.communicate(timeout=60)
    assert command.returncode == 0, err
    (path,) = (tmp_path / "runs").iterdir()
    run = RunFiles(path)
    assert (run.summary()["status"], run.summary()["world_size"], run.summary()["strategy"]) == ("completed", 2, "ddp")
    used = [index for rank in (0, 1) for record in run.records(rank) for index in record["samples"]]
    assert sorted(used) == sorted([*range(97)] * 2)
    # what torchrun began, our own supervisor goes on with, and the other way round
    again = subprocess.run(
        [sys.executable, "-m", "dure", "train", "--resume", path, "--epochs", "3", "--nproc", "3"], cwd=tmp_path
    )
    assert again.returncode == 0
    command = torchrun(tmp_path, "train", "--resume", path, "--epochs", "4")
    _, err = command.communicate(timeout=60)
    assert command.returncode == 0, err
    assert run.summary()["samples"] == 4 * 97


def test_torchrun_when_ranks_train_then_one_of_them_speaks_for_all(tmp_path):
    words = [word for word in BASE if word != "--quiet"]
    command = torchrun(tmp_path, *words)
    out, err = command.communicate(timeout=60)
    assert command.returncode == 0, err
    assert err.count("run folder") == 1
    assert (out + err).count("where the time went") <= 1
    command = torchrun(tmp_path, *words[:-3], "--name", "other", "--json")
    out, err = command.communicate(timeout=60)
    assert json.loads(out)["status"] == "completed", err


def test_torchrun_when_a_rank_fails_then_the_cause_is_shown_and_torchrun_fails(tmp_path):
    command = torchrun(tmp_path, *BASE, "--task.fault", "raise", "--task.rank", "1")
    _, err = command.communicate(timeout=60)
    assert command.returncode == 1
    assert "ValueError: a planned failure" in err
    assert "in fail: raise ValueError" in err
    assert "terminate called" not in err


def test_torchrun_when_settings_cannot_be_then_one_sentence_says_so(tmp_path):
    command = torchrun(tmp_path, *BASE, "--strategy", "single")
    _, err = command.communicate(timeout=60)
    assert command.returncode == 1  # torchrun's code for every failure
    assert err.count("dure: ") >= 1
    assert "Traceback" not in err.replace("Traceback : Signal", "").partition("dure: ")[2].partition("\n")[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("target", ["agent", "terminal"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_torchrun_when_it_gets_a_signal_then_ranks_checkpoint_and_the_run_can_be_resumed(number, target, tmp_path):
    command = torchrun(tmp_path, *BASE, "--task.pause-seconds", "0.02")
    run = RunFiles(tmp_path / "runs/run")
    wait_until(lambda: run.events("training"), "training")
    time.sleep(0.1)
    (os.kill if target == "agent" else os.killpg)(command.pid, number)
    _, err = command.communicate(timeout=60)
    assert command.returncode != 0
    assert run.summary()["status"] == "interrupted", err
    seen = run.records(0)[-1]["samples_seen"]
    assert seen < 194
    assert run.checkpoints()[-1] == f"samples-{seen:012d}"


def test_torchrun_when_it_is_killed_then_no_rank_trains_on(tmp_path):
    command = torchrun(tmp_path, *BASE, "--task.pause-seconds", "0.5")
    run = RunFiles(tmp_path / "runs/run")
    wait_until(lambda: run.events("training"), "training")
    ranks = psutil.Process(command.pid).children(recursive=True)
    assert len(ranks) >= 2
    command.kill()
    command.communicate()
    _, alive = psutil.wait_procs(ranks, timeout=2)
    for process in alive:
        process.kill()
    assert alive == []


def test_torchruns_variables_when_they_are_incomplete_then_one_sentence_says_so(prewarmed, tmp_path):
    command = prewarmed.run(tmp_path, *BASE, RANK="0", WORLD_SIZE="2")
    assert command.code == 3
    assert "the environment looks like torchrun's but is incomplete" in command.err
