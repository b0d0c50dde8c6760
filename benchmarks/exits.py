"""Do finished runs end with 0, and what do they leave behind? Counts the ends of the shortest runs on two ranks.

    python benchmarks/exits.py                       1,000 runs from one process, and some in every other way
    python benchmarks/exits.py --runs 20 --commands 2 --spawned 0 --torchrun 0 --results /tmp/exits

A minimal DDP script that simply returns aborts at exit in 12 of 50 runs (torch 2.13, gloo: `terminate called without
an active exception`), which is why this is counted at all. Half of the 1,000 runs have gloo, the other half `dure_shm`.

What is left behind is counted before, after the first run of each way and after the last: processes anywhere on the
host that carry this script's mark in their environment, ports that these or this process listen on, this process's
threads and open files, entries of `/dev/shm`, and of a folder that is everybody's place for temporary files. Exits with
1 if any run ended badly, or if more is left after the last than after the first.
"""

import argparse
import gc
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import torch
from paired import describe_surroundings, surroundings, write_results
from torch import Tensor, nn

import dure
from dure.data import TensorData

HERE = Path(__file__).resolve()
MARK = "EXITS_BENCHMARK_MARK"
"""Variable in the environment of everything that is started here, with a value of its own."""
OF_TORCH = ("torchinductor_", "torchelastic_")
"""Temporary folders that torch keeps: one for what it compiles, and one that torchrun leaves of each run."""
GRACE_SECONDS = 5.0
"""Seconds that processes which were told to end may take."""
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


@dataclass(frozen=True, kw_only=True)
class Left:
    """Counts at one moment; the names of the fields are the rows of the table."""

    processes: int
    """Processes that carry the mark, this one not counted."""
    listening_ports: int
    threads: int
    open_files: int
    shared_memory_segments: int
    temporary_files: int

    @classmethod
    def now(cls, place: Path) -> "Left":
        """Count; `place` is the folder for temporary files."""
        gc.collect()  # a store's socket lives as long as the object
        me = psutil.Process()
        others = list(_marked(me.pid))
        listening = [c for one in [me, *others] for c in _connections(one) if c.status == psutil.CONN_LISTEN]
        return cls(
            processes=len(others),
            listening_ports=len(listening),
            threads=me.num_threads(),
            open_files=me.num_fds(),
            shared_memory_segments=len(os.listdir("/dev/shm")),
            temporary_files=sum(not one.name.startswith(OF_TORCH) for one in place.iterdir()),
        )

    def exceeds(self, other: "Left") -> bool:
        """Return whether there is more of anything."""
        return any(getattr(self, field.name) > getattr(other, field.name) for field in fields(self))


def _marked(own: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            is_there = process.pid != own and process.status() != psutil.STATUS_ZOMBIE
            if is_there and process.environ().get(MARK) == os.environ[MARK]:
                yield process
        except psutil.Error:
            continue


def _connections(process: psutil.Process) -> list[Any]:
    try:
        return process.net_connections(kind="tcp")
    except psutil.Error:
        return []


def settled(place: Path, at_most: Left) -> Left:
    """Count when no more than `at_most` is left, or the time for that is over."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := Left.now(place)).exceeds(at_most) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def from_python(start: str, **settings: str) -> Callable[[Path], str]:
    """Run through `dure.train` in this process, whose forks (or spawned children) are the ranks."""

    def run(folder: Path) -> str:
        try:
            summary = dure.train(Shortest(), start=start, runs_dir=folder, **{**SETTINGS, **settings})
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


def count(name: str, times: int, run: Callable[[Path], str], place: Path) -> dict[str, Any]:
    """Run so many times, and return what the ends were and what was left."""
    ends: Counter[str] = Counter()
    seconds = []
    before = first = Left.now(place)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        for number in range(times):
            start = time.perf_counter()
            ends[run(Path(folder))] += 1
            seconds.append(time.perf_counter() - start)
            if number == 0:
                first = settled(place, before)
    last = settled(place, first)
    good = ends.pop("0", 0)
    for end, number in ends.items():
        print(f"    {name}: {number} x {end}", file=sys.stderr)
    median = sorted(seconds)[times // 2]
    print(f"{name}: {good} of {times} ended with 0, {median:.2f} s each", file=sys.stderr, flush=True)
    left = {"before": asdict(before), "after the first": asdict(first), "after the last": asdict(last)}
    is_good = not ends and not last.exceeds(first)
    return {"name": name, "runs": times, "good": good, "median_seconds": median, "left": left, "is_good": is_good}


def page(record: dict[str, Any]) -> str:
    """Return the result as a page."""
    load = ", ".join(f"{one:.1f}" for one in record["load_at_end"])
    lines = [
        f"# How runs end\n\n{describe_surroundings(record)} 2 ranks, 1 step; load at the end {load}.\n",
        "| started as | runs | ended with 0 | median |\n|---|---|---|---|",
        *(
            f"| {way['name']} | {way['runs']} | {way['good']} | {way['median_seconds']:.2f} s |"
            for way in record["ways"]
        ),
        "\nLeft behind, before / after the first run / after the last:\n",
        f"| what | {' | '.join(way['name'] for way in record['ways'])} |",
        "|---" * (len(record["ways"]) + 1) + "|",
    ]
    for field in fields(Left):
        counts = [" / ".join(str(left[field.name]) for left in way["left"].values()) for way in record["ways"]]
        lines.append(f"| {field.name.replace('_', ' ')} | {' | '.join(counts)} |")
    bare = "a minimal DDP script that simply returns aborts at its end in 12 of 50 runs on the same machine"
    return "\n".join([*lines, f"\nFor comparison: {bare}.\n"])


def main() -> int:
    """Count every way of starting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000, help="from one process, forked")
    parser.add_argument("--spawned", type=int, default=10, help="from one process, spawned")
    parser.add_argument("--commands", type=int, default=30, help="whole `dure train` commands")
    parser.add_argument("--torchrun", type=int, default=30, help="under torchrun")
    parser.add_argument("--results", type=Path, default=HERE.parent / "results")
    arguments = parser.parse_args()
    # torchrun takes `--nproc` for an abbreviation of its own flag, and decides on the number anyway
    flags = FLAGS[: FLAGS.index("--nproc")] + FLAGS[FLAGS.index("--nproc") + 2 :]
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "dure")
    half = arguments.runs // 2
    ways = [
        ("`dure.train`, forked, gloo", arguments.runs - half, from_python("fork", backend="gloo")),
        ("`dure.train`, forked, dure_shm", half, from_python("fork", backend="dure_shm")),
        ("`dure.train`, spawned", arguments.spawned, from_python("spawn")),
        ("`dure train`", arguments.commands, as_command("-m", "dure")),
        ("`dure train` under torchrun", arguments.torchrun, as_command(*torchrun, flags=flags)),
    ]
    os.environ[MARK] = secrets.token_hex(8)
    record: dict[str, Any] = surroundings()
    with tempfile.TemporaryDirectory(prefix="dure-exits-") as folder:
        place = Path(folder) / "tmp"
        place.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(place)
        record["ways"] = [count(name, times, run, place) for name, times, run in ways if times]
    record["load_at_end"] = os.getloadavg()
    write_results(arguments.results, "exits", record, page(record))
    return 0 if all(way["is_good"] for way in record["ways"]) else 1


if __name__ == "__main__":
    sys.exit(main())
