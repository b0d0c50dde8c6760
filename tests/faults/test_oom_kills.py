"""The kernel ends a rank that outgrows its control group: that is told with the limit; a `kill -9` is told apart."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.commands import Command, Prewarmed, RunFiles, wait_until

pytestmark = pytest.mark.faults

LIMIT_BYTES = 640 * 2**20
"""More than a supervisor and two ranks of this task need: about 250 MiB, most of it shared."""

TASK = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {folder!r})
from faulty_task import Faulty

if {group!r}:  # the whole run, as in a container: this is the supervisor, and its ranks follow it
    Path({group!r}, "cgroup.procs").write_text(str(os.getpid()))

class Growing(Faulty):
    def at(self, place):
        if place == "loss" and os.environ["RANK"] == "1" and self.is_due():
            Path("waiting").write_text(str(os.getpid()))
            while not Path("grow").exists():
                time.sleep(0.01)
            taken = []
            while True:
                taken.append(bytearray(os.urandom(1024)) * 2**14)  # 16 MiB, every page written
"""
RANK_1 = "rank 1 was killed (SIGKILL) by"
FULL = "the kernel, because the 640.0 MiB of memory that its container or job may use (the limit of its control group)"


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Make a memory group with a limit, of version 1 or 2; and with one on swap, unless it is not to have that."""
    top = Path("/sys/fs/cgroup")
    version_1 = (top / "memory").is_dir()
    folder = (top / "memory" if version_1 else top) / f"dure-test-{os.getpid()}-{time.time_ns()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"a control group cannot be made here: {error}")
    try:
        (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(LIMIT_BYTES))
        has_swap_limit = getattr(request, "param", True) or psutil.swap_memory().total > 0
        for swap in ("memory.memsw.limit_in_bytes", "memory.swap.max"):  # else it would only become slow
            if has_swap_limit and (folder / swap).exists():
                (folder / swap).write_text(str(LIMIT_BYTES) if version_1 else "0")
    except OSError as error:
        folder.rmdir()
        pytest.skip(f"a control group gets no limit here: {error}")
    yield folder

    def is_gone() -> bool:
        try:
            folder.rmdir()
        except OSError:  # the kernel takes a moment to forget who was in it
            return False
        return True

    wait_until(is_gone, "the end of the group")


def started(prewarmed: Prewarmed, folder: Path, *more: object, group: Path | str = "") -> tuple[Command, int]:
    """Start two ranks; return when rank 1 waits to grow, and its process."""
    task = folder / "growing.py"
    task.write_text(TASK.format(folder=str(Path(__file__).parents[1]), group=str(group)))
    base = ("train", f"{task}:Growing", "--nproc", 2, "--global-batch-size", 8, "--epochs", 1, "--name", "run")
    command = prewarmed.start(folder, *base, "--task.step", 1, *more)
    waiting = folder / "waiting"
    pid = command.wait_for(lambda: waiting.exists() and waiting.read_text(), "a rank that waits to grow")
    return command, int(pid)


def said_of(command: Command, folder: Path) -> str:
    assert command.wait() == 1
    said = RunFiles(folder / "runs/run").summary()["message"]
    assert all(line in command.err for line in said.splitlines())
    return said


@pytest.mark.parametrize("group", [True, False], ids=["limited swap", "no swap"], indirect=True)
def test_rank_when_the_kernel_kills_it_in_its_runs_group_then_the_limit_and_the_cure_are_told(
    prewarmed, tmp_path, group
):
    command, _ = started(prewarmed, tmp_path, "--max-restarts", 0, group=group)
    (tmp_path / "grow").touch()
    said = said_of(command, tmp_path)
    assert said.startswith(f"{RANK_1} {FULL} were full: raise that limit, or use fewer ranks, fewer loader workers")
    doctor = prewarmed.run(tmp_path, "doctor", "runs/run")
    assert " ".join(said.split()) in " ".join(doctor.out.split())  # which breaks its lines elsewhere


def test_rank_when_the_kernel_kills_it_in_a_group_that_it_was_put_into_then_that_ones_limit_is_told(
    prewarmed, tmp_path, group
):
    command, pid = started(prewarmed, tmp_path, "--max-restarts", 0)
    (group / "cgroup.procs").write_text(str(pid))
    time.sleep(1.2)  # the supervisor looks where its ranks are twice in a second
    (tmp_path / "grow").touch()
    assert said_of(command, tmp_path).startswith(f"{RANK_1} {FULL} were full")


def test_rank_when_somebody_kills_it_in_such_a_group_then_the_kernel_is_not_blamed(prewarmed, tmp_path, group):
    command, pid = started(prewarmed, tmp_path, "--max-restarts", 0, group=group)
    os.kill(pid, signal.SIGKILL)
    assert said_of(command, tmp_path).startswith(
        f"{RANK_1} somebody: the kernel has ended nothing of this run for want of memory meanwhile"
    )


def test_rank_when_it_outgrows_its_group_once_more_after_a_restart_then_it_is_not_tried_again(
    prewarmed, tmp_path, group
):
    command, _ = started(prewarmed, tmp_path, "--max-restarts", 5, group=group)
    (tmp_path / "grow").touch()
    said = said_of(command, tmp_path)
    assert FULL in said
    assert "the same failure came again at step 1 after a restart" in said
    (restart,) = RunFiles(tmp_path / "runs/run").events("restart")
    assert FULL in restart["message"]


def test_rank_when_it_outgrows_its_group_only_once_then_the_restart_gets_the_run_to_its_end(prewarmed, tmp_path, group):
    command, _ = started(prewarmed, tmp_path, "--max-restarts", 5, "--task.once", "grown", group=group)
    (tmp_path / "grow").touch()
    assert command.wait() == 0
    assert len(RunFiles(tmp_path / "runs/run").events("restart")) == 1
