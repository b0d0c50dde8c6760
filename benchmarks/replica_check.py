"""Cost of comparing replicas: bytes per second of the checksum, and the fraction of a run's time.

    python benchmarks/replica_check.py              about two minutes on two cores
    python benchmarks/replica_check.py --only sum   a few seconds

`run` trains three models on two processes. Within one run blocks of steps take turns in a random order: without
comparisons, the same again (the A/A copy), and with one after every step; so a block differs from its neighbours by
comparisons alone, waiting for the other rank included. What one costs, over the steps from one to the next that dure
has chosen by its own measurements, is the fraction of the time that comparisons take by default. A second run, as
everybody's, chooses them, and tells its own account.

`sum` takes the checksum of one tensor beside reading it (`torch.sum`), CRC-32 and BLAKE2b of the same bytes,
alternately on one thread.
"""

import argparse
import hashlib
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import step_models
import torch
from paired import HERE, compare, describe_surroundings, random_rounds, surroundings, write_results

import dure
from dure.records.events import ReplicasCompared
from dure.records.run_dir import RunDir
from dure.strategies.state.checksum import checksum
from dure.training.run_state.replica_check import MOST_FRACTION, ReplicaCheck

SIZES = (2**20, 2**24, 2**28)
"""Bytes: within a core's cache, within the machine's, in neither."""
BLOCK = {"tiny": 100, "deep": 12, "wide": 12}
"""Steps of a turn."""
SKIPPED = 30
"""The first steps of a run, which belong to no turn."""
WITHOUT, AGAIN, WITH = "without", "without, again (A/A)", "with one after every step"


def main() -> None:
    """Measure what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=["sum", "run"], action="append")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    parts = options.only or ["sum", "run"]
    record: dict[str, Any] = surroundings()
    page = [f"# What comparing replicas costs\n\n{describe_surroundings(record)}\n"]
    if "run" in parts:  # first: its ranks are forked, and sums may leave threads
        record["run"] = {model: runs(model, options.rounds) for model in BLOCK}
        page.append(_runs_page(record["run"]))
    if "sum" in parts:
        torch.set_num_threads(1)
        record["sum"] = {str(size): sums(size, 5) for size in SIZES}
        page.append(_sums_page(record["sum"]))
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
    """Return seconds per step of each kind of block, and what a run as everybody's told of its comparisons."""
    turns = [name for _, name in random_rounds([WITHOUT, AGAIN, WITH], num_rounds, seed=1)]
    block = BLOCK[model]

    def is_due(check: ReplicaCheck) -> bool:
        # what follows a step is in the time of the next one
        turn = (check.progression.step - SKIPPED) // block
        return check.is_on and 0 <= turn < len(turns) and turns[turn] == WITH

    num_steps = SKIPPED + block * len(turns)
    with tempfile.TemporaryDirectory(prefix="dure-replica-check-") as name:
        with mock.patch.object(ReplicaCheck, "is_due", is_due):
            run = train(Path(name), "turns", model, num_steps)
        times = [record.time for record in run.records(0)]
        seconds: dict[str, list[float]] = {kind: [] for kind in (WITHOUT, AGAIN, WITH)}
        for number, kind in enumerate(turns):
            begin = SKIPPED + number * block - 1
            seconds[kind].append((times[begin + block] - times[begin]) / block)
        usual = train(Path(name), "usual", model, num_steps)
        (told,) = (event for event in usual.events() if isinstance(event, ReplicasCompared))
    return {"seconds": seconds, "told": {key: getattr(told, key) for key in ("count", "every", "fraction")}}


def train(folder: Path, name: str, model: str, num_steps: int) -> RunDir:
    """Train a model on two processes in one epoch, so that no checkpoint comes in between."""
    batch = 2 * step_models.BATCHES[model]
    summary = dure.train(
        f"{HERE / 'tiny.py'}:Tiny",
        task_options={"model": model, "num_samples": num_steps * batch},
        strategy="ddp",
        nproc=2,
        global_batch_size=batch,
        device="cpu",
        threads=1,
        start="fork",
        snapshot_every=1_000_000,
        quiet=True,
        runs_dir=folder,
        name=name,
    )
    return RunDir.open(Path(summary.run))


def _runs_page(found: dict[str, Any]) -> str:
    lines = [
        "| model | ms per step without | A/A (middle half) | one comparison ms | steps between two | of the time | "
        f"at most {MOST_FRACTION:.0%} | by the account of the run, its beginning counted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, one in found.items():
        rows = {row.name: row for row in compare(one["seconds"], WITHOUT)}
        again, cost, every = rows[AGAIN], rows[WITH].difference, one["told"]["every"]
        step = statistics.median(one["seconds"][WITHOUT])
        fraction = cost / (every * step)
        verdict = "holds" if fraction <= MOST_FRACTION else "**does not hold**"
        lines.append(
            f"| {model} | {step * 1e3:.2f} | {again.ratio:.3f} ({again.ratio_low:.3f} to {again.ratio_high:.3f}) | "
            f"{cost * 1e3:.2f} | {every} | {fraction:.2%} | {verdict} | {one['told']['fraction']:.2%} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
