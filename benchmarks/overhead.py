"""Cost of dure over the loop by hand, Accelerate and Lightning Fabric: per step, and from the shell to a step.

    python benchmarks/overhead.py                     everything, about five minutes
    python benchmarks/overhead.py --only steps1       world size 1; steps2 and startup are the others

Writes benchmarks/results/overhead.md and .json.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import startup
import step_overhead
from paired import HERE, compare, describe_surroundings, surroundings, write_results

STEPS_HEAD = "| | us per step | over the loop by hand | ratio, median | ratio, middle half |\n|---|---|---|---|---|\n"
START_HEAD = "| | seconds | ratio, median | ratio, middle half |\n|---|---|---|---|\n"


def main() -> None:
    """Measure what is asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["steps1", "steps2", "startup"], action="append")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of all candidates, each a block of steps")
    parser.add_argument("--block", type=int, default=50, help="steps of a block")
    parser.add_argument("--starts", type=int, default=11, help="starts of each candidate")
    parser.add_argument("--profile", help="write cProfile files by this name (times mean little then)")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    parts = options.only or ["steps1", "steps2", "startup"]
    record: dict[str, Any] = {**surroundings(), "rounds": options.rounds, "block": options.block, "parts": {}}
    page = [f"# Overhead\n\n{describe_surroundings(record)}\n"]
    for part in parts:
        if part == "startup":
            page.append(_startup(record, options.starts))
        else:
            page.append(_steps(record, int(part[-1]), options))
    name = "overhead" if options.only is None else "overhead-" + "-".join(parts)
    write_results(options.results, name, record, "\n".join(page))


def _steps(record: dict[str, Any], world_size: int, options: argparse.Namespace) -> str:
    values = step_overhead.measure(world_size, num_rounds=options.rounds, block=options.block, profile=options.profile)
    rows = [asdict(row) for row in compare(values, step_overhead.BASELINE)]
    record["parts"][f"steps{world_size}"] = {"rows": rows, "microseconds": _rounded(values)}
    lines = [
        f"| {row['name']} | {row['median']:.1f} | {row['difference']:+.1f} | {row['ratio']:.3f} | "
        f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f} |\n"
        for row in sorted(rows, key=lambda row: row["difference"])
    ]
    kind = "one process" if world_size == 1 else f"{world_size} processes, DDP on gloo, one thread each"
    return (
        f"## A step, {kind}\n\nThe tiny model of `tiny_model.py`, {options.rounds} rounds of {options.block} steps "
        f"each in random order; dure writes its step records.\n\n{STEPS_HEAD}{''.join(lines)}"
    )


def _startup(record: dict[str, Any], num_starts: int) -> str:
    values = startup.measure(num_starts)
    rows = [asdict(row) for row in compare(values, startup.BASELINE)]
    record["parts"]["startup"] = {"rows": rows, "seconds": _rounded(values)}
    lines = [
        f"| {row['name']} | {row['median']:.2f} | {row['ratio']:.3f} | "
        f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f} |\n"
        for row in sorted(rows, key=lambda row: row["ratio"])
    ]
    head = f"## From the shell to the first step done, two processes, {num_starts} starts"
    return f"{head}\n\n{START_HEAD}{''.join(lines)}"


def _rounded(values: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {name: [round(value, 3) for value in column] for name, column in values.items()}


if __name__ == "__main__":
    main()
