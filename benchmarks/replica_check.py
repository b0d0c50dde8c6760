"""What comparing replicas costs: bytes per second of the checksum, and the fraction of a run's time.

    python benchmarks/replica_check.py              about five minutes on two cores
    python benchmarks/replica_check.py --only sum   a few seconds

`sum` takes the checksum of one tensor beside reading it (`torch.sum`), CRC-32 and BLAKE2b of the same bytes,
alternately on one thread. `run` trains three models on two processes with `--check-replicas-every 0` and with the
default, alternately: the ratio of their seconds per step is what comparisons cost, and each run's own account of it
stands beside.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import step_models
import torch
from paired import HERE, compare, describe_surroundings, random_rounds, surroundings, write_results

from dure.measure.checksum import checksum

SIZES = (2**20, 2**24, 2**28)
"""Bytes: within a core's cache, within the machine's, in neither."""
STEPS = {"tiny": 2000, "deep": 150, "wide": 100}
SKIPPED = 30
"""The first steps of a run, in which comparisons are frequent while their cost is found out."""


def main() -> None:
    """Measure what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["sum", "run"], action="append")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    parts = options.only or ["sum", "run"]
    torch.set_num_threads(1)
    record: dict[str, Any] = surroundings()
    page = [f"# What comparing replicas costs\n\n{describe_surroundings(record)}\n"]
    if "sum" in parts:
        record["sum"] = {str(size): sums(size, options.rounds) for size in SIZES}
        page.append(_sums_page(record["sum"]))
    if "run" in parts:
        record["run"] = {model: runs(model, options.rounds) for model in STEPS}
        page.append(_runs_page(record["run"]))
    write_results(options.results, "replica_check", record, "\n".join(page))


def sums(size: int, num_rounds: int) -> dict[str, list[float]]:
    """Return seconds of each way to go over `size` bytes, one per round."""
    tensor = torch.randn(size // 4)
    ways: dict[str, Callable[[], object]] = {
        "read (torch.sum)": tensor.view(torch.int64).sum,
        "checksum": lambda: checksum([tensor]),
        "CRC-32 (zlib)": lambda: zlib.crc32(tensor.numpy()),
        "BLAKE2b (hashlib)": lambda: hashlib.blake2b(tensor.numpy()).digest(),
    }
    repeats = max(1, 2**26 // size)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _, name in random_rounds(list(ways), num_rounds, seed=size):
        begun = time.perf_counter()
        for _ in range(repeats):
            ways[name]()
        seconds[name].append((time.perf_counter() - begun) / repeats)
    return seconds


def _sums_page(found: dict[str, dict[str, list[float]]]) -> str:
    lines = ["| bytes | way | GB/s | of the time of reading | middle half |", "|---|---|---|---|---|"]
    for size, seconds in found.items():
        for row in compare(seconds, "read (torch.sum)"):
            speed = int(size) / row.median / 1e9
            lines.append(
                f"| {int(size):,} | {row.name} | {speed:.2f} | {row.ratio:.1f} | {row.ratio_low:.1f} to "
                f"{row.ratio_high:.1f} |"
            )
    return "\n".join([*lines, ""])


def runs(model: str, num_rounds: int) -> dict[str, Any]:
    """Return seconds per step with and without comparisons, and what the runs told of them."""
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    told = []
    with tempfile.TemporaryDirectory(prefix="dure-replica-check-") as name:
        for number, which in random_rounds(list(seconds), num_rounds, seed=1):
            more = ["--check-replicas-every", "0"] if which == "without" else []
            run = train(Path(name), f"{model}-{number}-{which}", model, more)
            times = [record["time"] for record in _lines(run / "rank0.jsonl")]
            seconds[which].append((times[-1] - times[SKIPPED]) / (len(times) - 1 - SKIPPED))
            told += [event for event in _lines(run / "events.jsonl") if event["event"] == "replicas_compared"]
    return {"seconds": seconds, "told": [{key: e[key] for key in ("count", "every", "fraction")} for e in told]}


def train(folder: Path, name: str, model: str, more: list[str]) -> Path:
    """Train a model on two processes in one epoch, so that no checkpoint comes in between."""
    samples = STEPS[model] * 2 * step_models.BATCHES[model]
    command = (
        f"-m dure train {HERE / 'tiny.py'}:Tiny --task.model {model} --task.num-samples {samples} --strategy ddp "
        f"--nproc 2 --global-batch-size {2 * step_models.BATCHES[model]} --device cpu --threads 1 --max-restarts 0 "
        "--quiet"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent / "src"), os.environ.get("PYTHONPATH")]))
    subprocess.run(
        [sys.executable, *command.split(), "--runs-dir", str(folder), "--name", name, *more],
        env=environment, check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return folder / name


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _runs_page(found: dict[str, Any]) -> str:
    lines = [
        "| model | ms per step without | with | middle half | steps between comparisons | of the time, by the run |",
        "|---|---|---|---|---|---|",
    ]
    for model, one in found.items():
        row = next(row for row in compare(one["seconds"], "without") if row.name == "with")
        without = statistics.median(one["seconds"]["without"])
        every = statistics.median(event["every"] for event in one["told"])
        fraction = statistics.median(event["fraction"] for event in one["told"])
        lines.append(
            f"| {model} | {without * 1e3:.2f} | x {row.ratio:.3f} | {row.ratio_low:.3f} to {row.ratio_high:.3f} | "
            f"{every:g} | {fraction:.2%} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
