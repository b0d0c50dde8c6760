"""Do finished runs end with 0? Counts the ends of the shortest runs on two ranks, started in every way.

    python benchmarks/exits.py                       500 runs from one process, 30 commands, 30 under torchrun
    python benchmarks/exits.py --runs 20 --commands 0 --torchrun 0

A minimal DDP script that simply returns aborts at exit in 12 of 50 runs (torch 2.13, gloo: `terminate called without
an active exception`), which is why this is counted at all. Prints a table; exits with 1 if any run ended badly.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

import dure
from dure.data import TensorData

HERE = Path(__file__).resolve()
SETTINGS = {"strategy": "ddp", "nproc": 2, "samples": 4, "global_batch_size": 4, "device": "cpu", "quiet": True}
FLAGS = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))][:-1]


class Shortest(dure.Task):
    """One step of one linear layer."""

    def build_model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def train_data(self) -> TensorData:
        return TensorData(torch.ones(4, 2), torch.ones(4, 1))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])


def from_python(start: str) -> Callable[[Path], str]:
    """Run through `dure.train` in this process, whose forks (or spawned children) are the ranks."""

    def run(folder: Path) -> str:
        try:
            summary = dure.train(Shortest(), start=start, runs_dir=folder, **SETTINGS)
        except dure.DureError as error:
            return f"{type(error).__name__}: {error}"
        left = psutil.Process().children(recursive=True)
        return f"{len(left)} processes left" if left else {"completed": "0"}.get(summary.status, summary.status)

    return run


def as_command(*command: str, flags: Sequence[str] = FLAGS) -> Callable[[Path], str]:
    """Run a command of its own."""

    def run(folder: Path) -> str:
        words = [sys.executable, *command, "train", f"{HERE}:Shortest", *flags, "--runs-dir", str(folder)]
        done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return str(done.returncode) if done.returncode == 0 else f"{done.returncode}: {done.stderr[-300:]}"

    return run


def count(name: str, times: int, run: Callable[[Path], str]) -> bool:
    """Run so many times, print what the ends were, and return whether all were 0."""
    ends: Counter[str] = Counter()
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(times):
            start = time.perf_counter()
            ends[run(Path(folder))] += 1
            seconds.append(time.perf_counter() - start)
    if times:
        print(f"| {name} | {times} | {ends.pop('0', 0)} | {sorted(seconds)[times // 2]:.2f} s |", flush=True)
    for end, number in ends.items():
        print(f"    {number} x {end}", file=sys.stderr)
    return not ends


def main() -> int:
    """Count every way of starting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500, help="from one process, forked")
    parser.add_argument("--spawned", type=int, default=10, help="from one process, spawned")
    parser.add_argument("--commands", type=int, default=30, help="whole `dure train` commands")
    parser.add_argument("--torchrun", type=int, default=30, help="under torchrun")
    arguments = parser.parse_args()
    # torchrun takes `--nproc` for an abbreviation of its own flag, and decides on the number anyway
    flags = FLAGS[: FLAGS.index("--nproc")] + FLAGS[FLAGS.index("--nproc") + 2 :]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "dure")
    ways = [
        ("`dure.train`, ranks forked", arguments.runs, from_python("fork")),
        ("`dure.train`, ranks spawned", arguments.spawned, from_python("spawn")),
        ("`dure train`", arguments.commands, as_command("-m", "dure")),
        ("`dure train` under torchrun", arguments.torchrun, as_command(*torchrun, flags=flags)),
    ]
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, 2 ranks, 1 step\n")
    print("| started as | runs | ended with 0 | median |\n|---|---|---|---|")
    has_ended_well = [count(*way) for way in ways]
    return 0 if all(has_ended_well) else 1


if __name__ == "__main__":
    sys.exit(main())
