"""Strangers come to every port that a run opens, say nothing, too much or twice, and stay or leave: it goes on."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.commands import RunFiles, wait_until
from tests.strangers import disturb

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"

pytestmark = pytest.mark.faults


@pytest.mark.parametrize(
    "words",
    [
        ("ddp", "--backend", "gloo"),
        ("ddp",),
        ("ring_ddp", "--backend", "gloo", "--comm", "ring"),
        ("parameter_server", "--parameter-server.servers", "1"),
        (
            "parameter_server",
            "--parameter-server.servers",
            "1",
            "--no-parameter-server.sync",
            "--parameter-server.transport",
            "rpc",
        ),
    ],
    ids=" ".join,
)
def test_strangers_when_they_come_to_every_port_then_the_run_goes_on(words, prewarmed, tmp_path):
    command = prewarmed.start(
        tmp_path, "train", TASK, "--strategy", *words, "--nproc", 2, "--name", "run", "--global-batch-size", 8,
        "--quiet", "--max-restarts", 0, "--epochs", 20, "--task.pause-seconds", 0.01,
    )  # fmt: skip
    run = RunFiles(tmp_path / "runs/run")
    run.wait_for("checkpoint", command)
    stay = disturb(psutil.Process(command.pid))
    code = command.wait()
    for connection in stay:
        connection.close()
    assert code == 0, command.err
    assert stay
    assert run.summary()["samples"] == 20 * 97


SCRIPT = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
open(f"ready{dist.get_rank()}", "w").close()
for _ in range(300):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.01)
dist.barrier()
dist.destroy_process_group()
"""


def test_strangers_when_they_come_to_a_scripts_ports_then_it_goes_on(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "dure", "run", "--nproc", "2", "script.py"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        wait_until(lambda: (tmp_path / "ready1").exists() and (tmp_path / "ready0").exists(), "both ranks")
        stay = disturb(psutil.Process(run.pid))
        said = run.communicate(timeout=60)[0]
    for connection in stay:
        connection.close()
    assert run.returncode == 0, said
