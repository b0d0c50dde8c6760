"""Processes left behind by a rank that is gone, told apart from those of others."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from dure.launch.worker.leftovers import MARK_VARIABLE, end_leftovers, mark_of, started_at
from dure.launch.worker.worker_process import unnamed_file

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")


@pytest.fixture
def descriptor() -> Iterator[int]:
    """Open the unnamed file that a rank and what it forks hold."""
    opened = unnamed_file("dure-stacks")
    yield opened
    os.close(opened)


@pytest.fixture
def orphaned() -> Iterator[Callable[..., int]]:
    """Start a process whose parent is gone, and end it afterwards."""
    started: list[int] = []

    def start(act: Callable[[], object]) -> int:
        reading, writing = os.pipe()
        parent = os.fork()
        if parent == 0:
            pid = os.fork()
            if pid == 0:
                act()
                time.sleep(60)
                os._exit(0)
            os.write(writing, str(pid).encode())
            os._exit(0)
        os.waitpid(parent, 0)
        started.append(int(os.read(reading, 20)))
        os.close(reading)
        os.close(writing)
        return started[-1]

    yield start
    for pid in started:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def is_there(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def is_left(pid: int) -> bool:
    """Return whether a process is there after a while: it closes its descriptors before it is gone."""
    deadline = time.monotonic() + 5
    while is_there(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_there(pid)


def executing(mark: str, *, own_session: bool) -> Callable[[], None]:
    def act() -> None:
        if own_session:
            os.setsid()
        os.closerange(3, 100)
        os.execve("/bin/sleep", ["sleep", "60"], {MARK_VARIABLE: mark})

    return act


def settled(pid: int) -> int:
    """Wait until a process has become `sleep`."""
    deadline = time.monotonic() + 10
    while psutil.Process(pid).name() != "sleep" and time.monotonic() < deadline:
        time.sleep(0.01)
    return pid


def test_what_a_rank_forked_is_ended_in_whatever_session(descriptor, orphaned):
    pids = [orphaned(lambda: None), orphaned(os.setsid)]
    end_leftovers({mark_of(descriptor)}, started_at(os.getpid()))
    assert not any(map(is_left, pids))


def test_what_a_rank_executed_is_ended_but_for_programs_in_a_session_of_their_own(descriptor, orphaned):
    mark = mark_of(descriptor)
    program = settled(orphaned(executing(mark, own_session=False)))
    daemon = settled(orphaned(executing(mark, own_session=True)))
    end_leftovers({mark}, started_at(os.getpid()))
    assert (is_left(program), is_there(daemon)) == (False, True)


def test_what_the_calling_program_forked_while_ranks_ran_is_left_alone(descriptor):
    own = os.fork()
    if own == 0:
        time.sleep(60)
        os._exit(0)
    with subprocess.Popen(["sleep", "60"], env={MARK_VARIABLE: mark_of(descriptor)}) as program:
        end_leftovers({mark_of(descriptor)}, started_at(os.getpid()))
        assert is_there(own)
        assert is_there(program.pid)
        program.kill()
    os.kill(own, signal.SIGKILL)
    os.waitpid(own, 0)


def test_what_has_another_mark_is_left_alone(descriptor, orphaned):
    pid = orphaned(lambda: None)
    end_leftovers({"1-1"}, started_at(os.getpid()))
    assert is_there(pid)
