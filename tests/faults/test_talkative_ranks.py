"""Ranks of `dure train` that talk more, and otherwise, than anybody should."""

import re
import signal
from pathlib import Path

import pytest

from dure.launch.log_pump import LINE_LIMIT_BYTES, ROTATE_BYTES
from tests.commands import RunFiles, wait_until

TALKING = """
import os, sys, time
import torch
from torch import nn
import dure
from dure.data import TensorData


class Talking(dure.Task):
    def build_model(self):
        return nn.Linear(2, 1)

    def train_data(self):
        return TensorData(torch.ones(8, 2), torch.ones(8, 1))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        if os.environ["RANK"] == "1":
            begun = time.perf_counter()
            talk()
            print(f"talked for {time.perf_counter() - begun:.3f} seconds")
        return nn.functional.mse_loss(model(batch[0]), batch[1])


def talk():
    line = "a line that is about as long as lines of logs are, with its number"
    lines = "".join(f"{line}: {number:05d}\\n" for number in range(10_000))
    for _ in range(100):
        sys.stdout.write(lines)
    sys.stdout.flush()
    print("[rank 0] dure: all is well\\x1b[2J\\x07\\u2028[rank 0] and here")
    os.write(2, b"x" * 10_000_000 + b"\\n")
"""


@pytest.mark.faults
def test_rank_when_it_says_a_million_lines_then_none_waits_and_its_log_is_cut_escaped_and_rotated(prewarmed, tmp_path):
    (tmp_path / "talking.py").write_text(TALKING)
    task = f"{tmp_path / 'talking.py'}:Talking"
    command = prewarmed.run(
        tmp_path, "train", task, "--nproc", 2, "--samples", 8, "--global-batch-size", 8, "--name", "run", "--quiet"
    )
    assert command.code == 0, command.err
    assert command.err == ""  # another rank's words never come to the terminal
    log = RunFiles(tmp_path / "runs/run").path / "logs/rank1.log"
    assert (log.parent / "rank1.log.1").stat().st_size <= ROTATE_BYTES
    last = log.read_text().splitlines()[-3:]
    assert last[0] == "[rank 0] dure: all is well\\x1b[2J\\x07\\u2028[rank 0] and here"
    assert last[1] == "x" * LINE_LIMIT_BYTES + f" … {10_000_000 - LINE_LIMIT_BYTES:,} more bytes"
    seconds = re.fullmatch(r"talked for ([\d.]+) seconds", last[2])
    assert seconds is not None
    assert float(seconds[1]) < 20  # and a million lines a minute leave it sixty
    assert Path(f"{log}.1").read_text().startswith("a line that is about as long")


@pytest.mark.faults
def test_rank_when_it_says_one_thing_before_it_dies_then_that_is_in_its_log(prewarmed, tmp_path):
    dying = TALKING.replace(
        "talk()\n            print", "os.write(2, b'last words'); os.kill(os.getpid(), 9)\n            print"
    )
    (tmp_path / "talking.py").write_text(dying)
    task = f"{tmp_path / 'talking.py'}:Talking"
    command = prewarmed.run(
        tmp_path, "train", task, "--nproc", 2, "--samples", 8, "--global-batch-size", 8, "--name", "run", "--quiet",
        "--max-restarts", 0,
    )  # fmt: skip
    assert command.code == 1
    assert (tmp_path / "runs/run/logs/rank1.log").read_text().splitlines()[-1] == "last words"


CHILD_HOLDS_PIPES = """
import subprocess, time
from pathlib import Path
child = subprocess.Popen(["sleep", "30"])
Path(f"child of {__import__('os').environ['RANK']}").write_text(str(child.pid))
time.sleep(30)
"""


def test_launcher_when_it_is_killed_then_ranks_and_pump_are_gone_though_a_ranks_child_holds_their_pipes(
    prewarmed, tmp_path
):
    (tmp_path / "script.py").write_text(CHILD_HOLDS_PIPES)
    command = prewarmed.start(tmp_path, "run", "--nproc", 2, "script.py")
    wait_until(lambda: len(list(tmp_path.glob("child of *"))) == 2, "both ranks")
    children = {int(wait_until(file.read_text, "its pid")) for file in tmp_path.glob("child of *")}
    try:
        command.send(signal.SIGKILL)
        # what a script starts is its own, as under a shell; everything that dure started is to end
        wait_until(lambda: {process.pid for process in command.processes()} <= children, "ranks and pump to end", 5.0)
    finally:
        command.kill_all()
