"""A full disk, and checkpoints by the clock."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.commands import RunFiles, wait_until

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
BASE = ("train", TASK, "--nproc", 2, "--global-batch-size", 8, "--name", "run", "--quiet")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount two megabytes."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root on Linux")
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("this container may not mount")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.faults
def test_disk_when_it_is_full_for_checkpoints_then_training_goes_on_and_the_last_one_is_missed(
    small_disk, prewarmed, tmp_path
):
    flags = (*BASE, "--runs-dir", small_disk / "runs")
    filler = small_disk / "filler"
    assert prewarmed.run(tmp_path, *flags, "--samples", 97).code == 0
    run = RunFiles(small_disk / "runs/run")
    before = run.checkpoints()
    filler.write_bytes(b"x" * (os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize - 200_000))
    command = prewarmed.run(tmp_path, "train", "--resume", run.path, "--samples", 291, "--quiet")
    assert command.code == 2
    warning, error = command.err.splitlines()
    assert re.match(r"dure: a checkpoint needs 1\.\d MiB but 1\d\d\.\d KiB is free in ", warning)
    assert warning.endswith("training goes on, and the next checkpoint is tried again")
    assert error.startswith("dure: a checkpoint needs")
    assert run.records(0)[-1]["samples_seen"] == 291
    assert run.checkpoints() == before
    assert not list(run.path.glob("checkpoints/.*"))
    filler.unlink()
    assert prewarmed.run(tmp_path, "train", "--resume", run.path).code == 0
    assert run.summary()["samples"] == 291


@pytest.mark.faults
@pytest.mark.parametrize("is_freed", [True, False])
def test_disk_when_it_is_full_for_records_then_training_waits_for_space(is_freed, small_disk, prewarmed, tmp_path):
    flags = (*BASE, "--runs-dir", small_disk / "runs", "--epochs", 4, "--checkpoint.keep", 1, "--record-samples")
    filler = small_disk / "filler"
    command = prewarmed.start(tmp_path, *flags, "--task.pause-seconds", 0.05)
    run = RunFiles(small_disk / "runs/run")
    run.wait_for("training", command)
    space = os.statvfs(small_disk)
    with suppress(OSError):
        filler.write_bytes(b"x" * (space.f_bavail * space.f_frsize))
    wait_until(lambda: "waits for space for its records" in command.err, "a rank that waits for space")
    if is_freed:
        filler.unlink()
    assert command.wait() == (0 if is_freed else 2), command.err
    steps = [record["step"] for record in run.records(0)]
    assert steps == [*range(1, len(steps) + 1)]
    if is_freed:
        assert run.records(0)[-1]["samples_seen"] == run.summary()["samples"]
    else:
        assert "full" in command.err.splitlines()[-1]


@pytest.mark.faults
def test_checkpoints_when_the_clock_asks_then_all_ranks_save_at_the_same_step(prewarmed, tmp_path):
    size = ("--task.num-samples", 970, "--epochs", 1, "--checkpoint.keep", 99)
    flags = ("--checkpoint.every-minutes", 0.005, "--task.pause-seconds", 0.02, *size)
    command = prewarmed.run(tmp_path, *BASE, *flags)
    assert command.code == 0, command.err
    saves = [event["samples_seen"] for event in RunFiles(tmp_path / "runs/run").events("checkpoint")]
    by_clock = [seen for seen in saves if seen < 970]
    assert len(by_clock) >= 4  # at least 2.4 s of training, a save each 0.3 s
    assert len(set(saves)) == len(saves)
