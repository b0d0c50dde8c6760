"""Gain of waiting less often: averaging at H = 16 against compute alone, async against sync with a slow worker.

    python benchmarks/relaxed.py                      both parts, about four minutes

Writes benchmarks/results/relaxed.md and .json. Bounds: averaging at most 1.10 of compute alone; the asynchronous
parameter server at least 1.4 times the synchronous one's updates per second when one of two workers is twice as slow.
"""

import argparse
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import step_overhead
from paired import HERE, compare, describe_surroundings, random_rounds, surroundings, write_results

import dure

HEAD = "| | us per step | ratio to compute alone, median | middle half |\n|---|---|---|---|\n"
PARTS = ("averaging", "servers")


def main() -> None:
    """Measure what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--runs", type=int, default=9, help="runs of each parameter server")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    record: dict[str, Any] = {**surroundings(), "parts": {}}
    page = [f"# Waiting less often\n\n{describe_surroundings(record)}\n"]
    parts = options.only or PARTS
    if "averaging" in parts:
        page.append(_averaging(record, options.rounds))
    if "servers" in parts:
        page.append(_servers(record, options.runs))
    write_results(options.results, "relaxed", record, "\n".join(page))


def _averaging(record: dict[str, Any], num_rounds: int) -> str:
    # a block is one whole period of averaging
    values = step_overhead.measure(
        2,
        num_rounds=num_rounds,
        block=16,
        model="wide",
        strategy="averaging",
        settings={"averaging": {"average_every": 16}},
    )
    rows = [asdict(row) for row in compare(values, "compute alone")]
    record["parts"]["averaging"] = {"rows": rows}
    lines = [
        f"| {'dure, averaging at H = 16' if row['name'] == 'dure' else row['name']} | {row['median']:.0f} | "
        f"{row['ratio']:.3f} | {row['ratio_low']:.3f} to {row['ratio_high']:.3f} |\n"
        for row in sorted(rows, key=lambda row: row["ratio"])
    ]
    return f"## Averaging, 6 million parameters, 2 processes\n\n{HEAD}{''.join(lines)}"


def _servers(record: dict[str, Any], num_runs: int) -> str:
    """Time whole runs of which one of two workers takes twice as long, synchronous and asynchronous in random order."""
    seconds: dict[str, list[float]] = {"sync": [], "async": [], "sync, again (A/A)": []}
    with tempfile.TemporaryDirectory(prefix="dure-relaxed-") as folder:
        for _, name in random_rounds(list(seconds), num_runs, seed=0):
            seconds[name].append(_seconds_of_updates(Path(folder), is_sync=name != "async"))
    ratios = {
        name: [sync / own for sync, own in zip(seconds["sync"], column, strict=True)]
        for name, column in seconds.items()
    }
    record["parts"]["servers"] = {"seconds_per_update": seconds, "ratios": ratios}
    lines = []
    for name, column in seconds.items():
        low, _, high = statistics.quantiles(ratios[name], n=4)
        lines.append(
            f"| {name} | {1 / statistics.median(column):.1f} | {statistics.median(ratios[name]):.2f} | "
            f"{low:.2f} to {high:.2f} |\n"
        )
    head = "| | updates per second | ratio to sync, median | middle half |\n|---|---|---|---|\n"
    return f"## Parameter server, 2 workers of which one sleeps as long as it computes\n\n{head}{''.join(lines)}"


def _seconds_of_updates(folder: Path, *, is_sync: bool) -> float:
    """Return the seconds per worker's gradient that reached the servers."""
    summary = dure.train(
        f"{HERE / 'slow_worker.py'}:SlowWorker",
        strategy="parameter_server",
        nproc=2,
        parameter_server={"servers": 1, "sync": is_sync},
        samples=16 * 2 * 120,
        global_batch_size=32,
        runs_dir=folder,
        quiet=True,
        device="cpu",
        threads=1,
    )
    return sum(summary.seconds.values()) / (summary.samples / 16)


if __name__ == "__main__":
    main()
