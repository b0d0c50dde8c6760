"""Ranks of `dure train` that talk more, and otherwise, than anybody should."""

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from dure.launch.logs.log_pump import LINE_LIMIT_BYTES, ROTATE_BYTES
from tests.commands import Command, Prewarmed, wait_until

TALKING = """
import glob, os, sys, time
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
        return TalkingSGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])


class TalkingSGD(torch.optim.SGD):
    def step(self, closure=None):  # and not the loss, which is tried before, as the first steps are on rank 0
        if os.environ["RANK"] == os.environ["TALKING_RANK"] and glob.glob("runs/*/rank*.jsonl"):
            begun = time.perf_counter()
            talk()
            print(f"talked for {time.perf_counter() - begun:.3f} seconds")
        super().step(closure)


def talk():
    line = "a line that is about as long as lines of logs are, with its number"
    lines = "".join(f"{line}: {number:05d}\\n" for number in range(10_000))
    for _ in range(100):
        sys.stdout.write(lines)
    sys.stdout.flush()
    print("[rank 0] dure: all is well\\x1b[2J\\x07\\u2028[rank 0] and here")
    os.write(2, b"x" * 10_000_000 + b"\\n")
"""


def run_talking(prewarmed: Prewarmed, folder: Path, rank: int, *flags: object, text: str = TALKING) -> Command:
    (folder / "talking.py").write_text(text)
    command = ["train", f"{folder / 'talking.py'}:Talking", "--nproc", 2, "--samples", 8, "--global-batch-size", 8]
    return prewarmed.run(folder, *command, "--name", "run", "--quiet", *flags, TALKING_RANK=str(rank))


@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_when_it_says_a_million_lines_then_none_waits_and_all_are_cut_escaped_and_rotated(
    rank, prewarmed, tmp_path
):
    command = run_talking(prewarmed, tmp_path, rank)
    assert command.code == 0, command.err[-1000:]
    assert command.out == ""
    log = tmp_path / f"runs/run/logs/rank{rank}.log"
    assert Path(f"{log}.1").stat().st_size <= ROTATE_BYTES
    kept = Path(f"{log}.1").read_text() + log.read_text()
    # what another rank than the first says never comes to the terminal
    assert command.err == (kept if rank == 0 else "")
    assert kept.startswith("a line that is about as long")
    assert kept.count("\n") == 1_000_003
    last = kept[-20_000:].splitlines()[-3:]
    assert last[0] == "[rank 0] dure: all is well\\x1b[2J\\x07\\u2028[rank 0] and here"
    assert last[1] == "x" * LINE_LIMIT_BYTES + f" … {10_000_000 - LINE_LIMIT_BYTES:,} more bytes"
    seconds = re.fullmatch(r"talked for ([\d.]+) seconds", last[2])
    assert seconds is not None
    assert float(seconds[1]) < 20  # and a million lines a minute leave it sixty


@pytest.mark.faults
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_when_it_says_one_thing_before_it_dies_then_that_is_in_its_log(rank, prewarmed, tmp_path):
    dying = TALKING.replace(
        "talk()\n            print", "os.write(2, b'last words'); os.kill(os.getpid(), 9)\n            print"
    )
    command = run_talking(prewarmed, tmp_path, rank, "--max-restarts", 0, text=dying)
    assert command.code == 1
    assert (tmp_path / f"runs/run/logs/rank{rank}.log").read_text().splitlines()[-1] == "last words"
    said = command.err.splitlines()
    assert said[:1] == ["last words"] if rank == 0 else "last words" not in said
    assert any(line.startswith(f"dure: rank {rank} ") for line in said)


IN_A_TERMINAL = """
def talk():
    import shutil
    print(f"{shutil.get_terminal_size().columns} columns")
    print("\\r10%", end="", flush=True)
    while not os.path.exists("seen"):
        time.sleep(0.01)
"""


@pytest.mark.faults
def test_first_rank_in_a_terminal_then_its_bar_is_redrawn_and_it_knows_how_wide_that_is(tmp_path):
    (tmp_path / "talking.py").write_text(TALKING + IN_A_TERMINAL)
    own, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 57, 0, 0))
    words = ["train", "talking.py:Talking", "--nproc", "2", "--samples", "8", "--global-batch-size", "8", "--quiet"]
    environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = subprocess.Popen(
        [sys.executable, "-m", "dure", *words],
        cwd=tmp_path,
        env={**environ, "TERM": "xterm", "TALKING_RANK": "0"},
        stderr=terminal,
    )
    shown = b""
    try:
        os.close(terminal)
        while b"\r10%\x1b[K" not in shown:  # which has no end of line yet
            assert select.select([own], [], [], 60)[0], shown
            shown += os.read(own, 2**16)
        (tmp_path / "seen").touch()
        assert command.wait(60) == 0
    finally:
        command.kill()
        command.wait()
        os.close(own)
    assert b"57 columns\r\n" in shown


CHILD_HOLDS_PIPES = """
import subprocess, time
print("here", flush=True)
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
