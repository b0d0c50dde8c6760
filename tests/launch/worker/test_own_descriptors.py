"""Descriptors that a rank has from its supervisor, where a script closes all that it finds and opens its own."""

import faulthandler
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dure.launch.hangs.probe import examine
from dure.launch.worker.child import _MaybeRead
from dure.launch.worker.questions import Questions, wait_for_answers
from dure.launch.worker.responder import STACKS_SIGNAL, STATE, _start_observer
from dure.launch.worker.worker_process import Worker, unnamed_file
from dure.process.heartbeat import Heartbeats
from dure.process.own_descriptors import is_own, keep, usable
from tests.commands import Prewarmed

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def in_child(work: Callable[[], object]) -> int:
    """Do it in a forked process; return its exit code, 0 if it went well."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_descriptor_when_it_is_kept_then_closing_the_first_thousand_leaves_it_alone():
    given = unnamed_file("given")

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        kept = keep(given)
        os.closerange(3, 1000)
        assert is_own(kept)
        os.write(kept, b"told")

    assert in_child(work) == 0
    assert os.pread(given, 10, 0) == b"told"
    os.close(given)


@ON_LINUX
def test_descriptor_when_a_script_has_its_number_then_that_is_left_alone_and_the_file_opened_again(tmp_path):
    given, path = unnamed_file("given"), tmp_path / "theirs"

    def work() -> None:
        kept = keep(given)
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), kept)
        assert not is_own(kept)
        again = usable(kept)
        assert again not in (None, kept)
        os.write(again, b"told")

    assert in_child(work) == 0
    assert (os.pread(given, 10, 0), path.read_bytes()) == (b"told", b"")
    os.close(given)


def test_descriptor_when_a_process_is_forked_then_it_is_not_that_ones():
    kept = keep(unnamed_file("given"))
    assert in_child(lambda: os._exit(int(usable(kept) is not None))) == 0
    assert usable(kept) == kept
    os.close(kept)


def test_observer_when_a_script_has_the_number_of_its_socket_then_takes_and_sends_nothing():
    mine, theirs = socket.socketpair()
    questions = Questions(mine)
    one, other = socket.socketpair()
    descriptor = keep(theirs.detach())
    _start_observer(descriptor)
    time.sleep(0.05)  # it waits for a question
    os.dup2(one.fileno(), descriptor)
    questions.ask(STATE)
    wait_for_answers([questions], 5)
    assert (questions.take(1), questions.is_over) == (None, True)
    other.sendall(b"for the script")
    assert os.read(descriptor, 100) == b"for the script"
    other.setblocking(False)
    with pytest.raises(BlockingIOError, match="unavailable"):
        other.recv(100)
    os.close(descriptor)
    for each in (questions, one, other):
        each.close()


@ON_LINUX
def test_rank_when_a_script_has_the_number_of_its_stacks_then_no_handler_is_asked_to_write(tmp_path):
    mine, theirs = socket.socketpair()
    stacks, path = unnamed_file("stacks"), tmp_path / "theirs"
    ready, said = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            opened = os.open(path, os.O_RDWR | os.O_CREAT)
            faulthandler.register(STACKS_SIGNAL, file=opened)
            os.write(stacks, f"main thread 0x01\nstacks {opened}\nobserver {threading.get_native_id()}\n".encode())
            os.write(said, b".")
            threading.Event().wait()
        finally:
            os._exit(0)
    os.read(ready, 1)
    theirs.close()
    worker = Worker(rank=0, pid=pid, report_fd=unnamed_file("report"), stacks_fd=stacks, questions=Questions(mine))
    heartbeats = unnamed_file("heartbeats")
    try:
        (state,) = examine([worker], Heartbeats(heartbeats, 1))
    finally:
        worker.stop_at_once()
        while worker.end is None:
            worker.poll()
    assert (state.main, path.read_bytes()) == ((), b"")
    for each in (heartbeats, ready, said):
        os.close(each)


def test_output_when_a_script_put_a_pipe_of_its_own_there_then_an_error_is_the_scripts():
    reading, writing = os.pipe()
    stream = _MaybeRead(writing, "<stdout>")
    its_reading, its_writing = os.pipe()
    os.dup2(its_writing, writing)
    os.close(its_reading)
    with pytest.raises(BrokenPipeError, match="pipe"):
        stream.write(b"words")
    for each in (reading, writing, its_writing):
        os.close(each)


CLOSES_ALL = """
import os, socket, sys
os.closerange(3, os.sysconf("SC_OPEN_MAX"))
files = [open(f"theirs-{number}", "wb", buffering=0) for number in range(20)]
pairs = [socket.socketpair() for _ in range(20)]
import torch
weight = torch.nn.Parameter(torch.ones(1))
torch.optim.SGD([weight]).step()
pid = os.fork()
if pid == 0:
    raise RuntimeError("the child's")
os.waitpid(pid, 0)
if os.environ["END"] == "raise":
    raise ValueError("on purpose")
if os.environ["END"] == "exit":
    sys.exit(5)
"""


@ON_LINUX
@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("", 0, ""),
        ("exit", 5, "the script ended with exit code 5\n  script.py:"),
        ("raise", 1, "ValueError: on purpose"),
    ],
)
def test_script_when_it_closes_all_and_opens_its_own_then_ends_as_it_would_and_has_them(
    end: str, code: int, said: str, prewarmed: Prewarmed, tmp_path: Path
):
    (tmp_path / "script.py").write_text(CLOSES_ALL)
    run = prewarmed.run(tmp_path, "run", "--nproc", "1", "script.py", END=end)
    assert run.code == code, run.err
    assert said in run.err.rpartition("dure: ")[2]
    assert {path.stat().st_size for path in tmp_path.glob("theirs-*")} == {0}


MEETS = """
import os, torch, torch.distributed as dist
if os.environ["RANK"] == "1":
    os.closerange(3, 1000)
dist.init_process_group("gloo")
number = torch.ones(1)
dist.all_reduce(number)
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("once")
print(number.item())
dist.destroy_process_group()
os.closerange(3, 1000)
"""


def test_script_when_a_rank_closes_all_and_fails_once_then_is_started_again(prewarmed: Prewarmed, tmp_path: Path):
    (tmp_path / "script.py").write_text(MEETS)
    run = prewarmed.run(tmp_path, "run", "--nproc", "2", "--max-restarts", "1", "script.py")
    assert run.code == 0, run.err
    assert "rank 1 failed: ValueError: once (script.py:9)" in run.err
    assert run.out.count("2.0") >= 2


CLOSING_TASK = """
import os
from contextlib import suppress
import torch
from torch import nn
import dure
from dure.data import TensorData

def close(way):
    if way == "range":
        os.closerange(3, 4096)
    elif way == "forked":
        pid = os.fork()
        if pid == 0:
            os.closerange(3, 4096)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    else:
        for descriptor in range(3, 4096):
            with suppress(OSError):
                os.close(descriptor)

class Closing(dure.Task):
    place: str = "loss"
    way: str = "range"

    def at(self, place):
        if place == self.place and "RANK" in os.environ:
            close(self.way)

    def __post_init__(self):
        self.at("init")

    def build_model(self):
        self.at("build_model")
        return nn.Linear(2, 1)

    def train_data(self):
        return TensorData(torch.ones(16, 2), torch.ones(16, 1))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        self.at("loss")
        return nn.functional.mse_loss(model(batch[0]), batch[1])
"""
TRAIN = ("train", "task.py:Closing", "--name", "run", "--global-batch-size", 8, "--epochs", 1, "--quiet")


@pytest.mark.parametrize("place", ["init", "build_model", "loss"])
def test_task_when_it_closes_all_descriptors_then_its_line_and_the_cure_are_named(
    place, prewarmed: Prewarmed, tmp_path
):
    (tmp_path / "task.py").write_text(CLOSING_TASK)
    run = prewarmed.run(tmp_path, *TRAIN, "--nproc", 2, "--max-restarts", 0, "--task.place", place)
    assert run.code == (2 if place == "init" else 1), run.err  # a class that cannot be made is misuse
    assert (
        "PermissionError: os.closerange(3, 4096) would close what torch and dure have open in this process: close what "
        "the task opened by itself"
    ) in run.err
    assert ('task.py", line 11' if place == "init" else "task.py:11") in run.err, run.err


def test_task_when_a_process_that_it_forks_closes_all_descriptors_then_it_goes_on(prewarmed: Prewarmed, tmp_path):
    (tmp_path / "task.py").write_text(CLOSING_TASK)
    run = prewarmed.run(tmp_path, *TRAIN, "--nproc", 2, "--task.way", "forked", "--task.place", "build_model")
    assert run.code == 0, run.err


def test_task_when_it_closes_the_files_of_dure_one_by_one_then_that_is_said(prewarmed: Prewarmed, tmp_path):
    (tmp_path / "task.py").write_text(CLOSING_TASK)
    run = prewarmed.run(tmp_path, *TRAIN, "--nproc", 1, "--max-restarts", 0, "--task.way", "loop")
    assert run.code != 0
    assert "a file that dure had open is closed ([Errno 9] Bad file descriptor): where the task or" in run.err, run.err
