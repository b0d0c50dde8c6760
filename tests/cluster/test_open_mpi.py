"""Ranks under a real mpirun of Open MPI."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands import RunFiles

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
BASE = ("train", TASK, "--global-batch-size", "8", "--epochs", "2", "--quiet", "--threads", "1", "--name", "run")

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def mpirun(folder, number, *words, **environment) -> "subprocess.CompletedProcess[str]":
    assert shutil.which("mpirun"), "mpirun is not installed: `make cluster` installs what these tests need"
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpirun", *as_root, "--oversubscribe", "-n", str(number), *words]
    environ = {**os.environ, **environment}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)


def test_mpirun_when_it_starts_two_processes_then_they_are_one_run(dure, tmp_path):
    done = mpirun(tmp_path, 2, *dure, *BASE)
    assert done.returncode == 0, done.stderr
    run = RunFiles(tmp_path / "runs/run")
    assert (run.summary()["world_size"], run.events("training")[0]["transport"]) == (2, "shared memory")
    again = [*dure, *BASE[:-1], "own", "--nproc", "2"]
    subprocess.run(again, cwd=tmp_path, check=True, timeout=60)
    told = subprocess.run([*dure, "diff", "runs/run", "runs/own"], cwd=tmp_path, capture_output=True, text=True)
    assert told.returncode == 0, told.stdout


def test_mpirun_when_two_runs_share_a_host_then_each_meets_its_own_ranks(dure, tmp_path):
    assert shutil.which("mpirun"), "mpirun is not installed: `make cluster` installs what these tests need"
    folders = [tmp_path / "a", tmp_path / "b"]
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    both = []
    for folder in folders:
        folder.mkdir()
        words = ["mpirun", *as_root, "--oversubscribe", "-n", "2", *dure, *BASE]
        both.append(subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True))
    said = [one.communicate(timeout=120)[1] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert [RunFiles(folder / "runs/run").summary()["world_size"] for folder in folders] == [2, 2]


def test_mpirun_when_it_starts_one_process_then_that_may_start_ranks_of_its_own(dure, tmp_path):
    done = mpirun(tmp_path, 1, *dure, *BASE, "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert RunFiles(tmp_path / "runs/run").summary()["world_size"] == 2


def test_mpirun_when_a_rank_fails_then_the_cause_is_shown(dure, tmp_path):
    done = mpirun(tmp_path, 2, *dure, *BASE, "--task.fault", "raise", "--task.rank", "1")
    assert done.returncode == 1
    assert "ValueError: a planned failure" in done.stderr


def test_mpirun_when_torchruns_variables_say_something_else_then_it_is_refused(dure, tmp_path):
    done = mpirun(tmp_path, 2, *dure, *BASE, RANK="7", WORLD_SIZE="9")
    assert done.returncode == 3
    assert "the environment mixes mpirun's variables (OMPI_COMM_WORLD_RANK=" in done.stderr
