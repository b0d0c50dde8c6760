"""Runs on a real Ray: a local cluster, and two nodes of one on this host."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import eventually_gone
from tests.commands import RunFiles, wait_until

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
BASE = (TASK, "--global-batch-size", "8", "--epochs", "2", "--threads", "1")

TWO_NODES = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """Give Ray a folder for its files, and see that no process that knows it is left."""
    assert importlib.util.find_spec("ray"), "ray is not installed: `make cluster` installs what these tests need"
    # a socket's path has at most 107 bytes, and Ray puts 70 after this
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    yield folder
    left = eventually_gone(folder)
    for process in left:
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)
    assert left == []


def submit(folder, ray_folder, dure, *words) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*dure, "submit", "--to", "ray", *words],
        cwd=folder,
        env={**os.environ, "RAY_TMPDIR": str(ray_folder), "RAY_ADDRESS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ray_when_it_has_two_cores_then_two_actors_are_one_run(dure, ray_folder, tmp_path):
    command = submit(tmp_path, ray_folder, dure, "--tasks-per-node", "2", "--name", "run", *BASE, "--quiet")
    out, err = command.communicate(timeout=120)
    assert command.returncode == 0, err
    assert out == "run runs/run completed\n"
    run = RunFiles(tmp_path / "runs/run")
    assert (run.summary()["world_size"], run.events("training")[0]["transport"]) == (2, "shared memory")
    own = [*dure, "train", *BASE, "--quiet", "--name", "own", "--nproc", "2"]
    subprocess.run(own, cwd=tmp_path, check=True, timeout=60)
    told = subprocess.run([*dure, "diff", "runs/run", "runs/own"], cwd=tmp_path, capture_output=True, text=True)
    assert told.returncode == 0, told.stdout


def test_ray_when_a_rank_fails_then_the_cause_and_its_exit_code_come_back(dure, ray_folder, tmp_path):
    fault = ("--task.fault", "raise", "--task.rank", "1")
    command = submit(tmp_path, ray_folder, dure, "--tasks-per-node", "2", "--name", "run", *BASE, *fault)
    _, err = command.communicate(timeout=120)
    assert command.returncode == 1
    assert "ValueError: a planned failure" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGTERM, 143)])
def test_ray_when_a_signal_comes_then_ranks_checkpoint_and_the_run_can_go_on(number, code, dure, ray_folder, tmp_path):
    slowly = ("--task.pause-seconds", "0.1")
    command = submit(tmp_path, ray_folder, dure, "--tasks-per-node", "2", "--name", "run", *BASE, *slowly)
    run = RunFiles(tmp_path / "runs/run")
    wait_until(lambda: run.records(0), "a step")
    command.send_signal(number)
    _, err = command.communicate(timeout=60)
    assert command.returncode == code, err
    assert "continue with `dure train --resume runs/run`" in err
    seen = run.records(0)[-1]["samples_seen"]
    assert run.checkpoints()[-1] == f"samples-{seen:012d}"


def test_ray_when_what_is_asked_never_fits_then_it_is_said_with_3(dure, ray_folder, tmp_path):
    command = submit(tmp_path, ray_folder, dure, "--tasks-per-node", "99", TASK, "--global-batch-size", "99")
    _, err = command.communicate(timeout=120)
    assert command.returncode == 3
    assert "and the cluster has CPU" in err


def test_ray_when_the_submitter_is_killed_then_no_rank_trains_on(dure, ray_folder, tmp_path):
    words = ("--tasks-per-node", "2", "--name", "run", *BASE, "--task.pause-seconds", "0.5")
    command = submit(tmp_path, ray_folder, dure, *words)
    run = RunFiles(tmp_path / "runs/run")
    wait_until(lambda: run.records(0), "a step")
    command.kill()
    command.communicate()
    assert eventually_gone(ray_folder, 30) == []
    number = len(run.records(0))
    time.sleep(1.5)
    assert len(run.records(0)) == number


def test_ray_when_it_has_two_nodes_then_each_has_a_rank(dure, ray_folder, tmp_path):
    environ = {**os.environ, "RAY_TMPDIR": str(ray_folder), "RAY_USAGE_STATS_ENABLED": "0"}
    cluster = subprocess.Popen(
        [sys.executable, "-c", TWO_NODES],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        address = cluster.stdout.readline().strip()
        words = ("--address", address, "--nodes", "2", "--name", "run", *BASE, "--quiet")
        command = submit(tmp_path, ray_folder, dure, *words)
        _, err = command.communicate(timeout=120)
        assert command.returncode == 0, err
    finally:
        cluster.communicate(timeout=60)
    run = RunFiles(tmp_path / "runs/run")
    assert (run.summary()["world_size"], run.events("training")[0]["transport"]) == (2, "sockets (gloo)")


def test_ray_when_nobody_answers_at_the_address_then_it_is_said_with_3(dure, ray_folder, tmp_path):
    command = submit(tmp_path, ray_folder, dure, "--address", "127.0.0.1:1", "--name", "run", *BASE)
    _, err = command.communicate(timeout=120)
    assert command.returncode == 3
    assert "no cluster of Ray can be reached at 127.0.0.1:1" in err


def test_dry_run_when_ray_is_here_then_nothing_of_it_is_started(dure, ray_folder, tmp_path):
    command = submit(tmp_path, ray_folder, dure, "--dry-run", "--tasks-per-node", "2", "--name", "run", *BASE)
    out, _ = command.communicate(timeout=60)
    assert len(json.loads(out)["actors"]) == 2
    assert list(ray_folder.iterdir()) == []
