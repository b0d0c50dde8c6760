"""Seconds from the shell to the first step done: `dure train` on two processes beside DDP by hand under torchrun."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from paired import HERE, random_rounds

BASELINE = "by hand under torchrun"


def dure(folder: Path) -> float:
    """Return when the first step of `dure train` was done."""
    command = f"train {HERE / 'tiny.py'}:Tiny --strategy ddp --nproc 2 --samples 1024 --global-batch-size 128 --quiet"
    _run([sys.executable, "-m", "dure", *command.split(), "--device", "cpu", "--runs-dir", str(folder)])
    records = next(folder.glob("*/rank0.jsonl")).read_text().splitlines()
    return float(json.loads(records[0])["time"])


def torchrun(folder: Path) -> float:
    """Return when the first step of the script was done."""
    file = folder / "first"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(HERE / "ddp_by_hand.py")]
    # about one such script in four aborts when it ends; it has done its first step by then
    _run([sys.executable, *command], done=file.exists, FIRST_STEP_FILE=str(file))
    return float(file.read_text())


def _run(command: list[str], *, done: Callable[[], bool] = lambda: False, **variables: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]))
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode and not done():
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr}")


def measure(num_rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each, one value per round."""
    starts = {BASELINE: torchrun, "by hand under torchrun, again (A/A)": torchrun, "dure": dure}
    seconds: dict[str, list[float]] = {name: [] for name in starts}
    for number, name in random_rounds(list(starts), num_rounds + 1, seed=1):
        with tempfile.TemporaryDirectory(prefix="dure-startup-") as folder:
            begin = time.time()
            elapsed = starts[name](Path(folder)) - begin
        if number > 0:  # the first round warms the disk's cache and writes .pyc files
            seconds[name].append(elapsed)
    return seconds
