"""Seconds in which a model is built: plainly, with its draws recorded, and again from the record, in threads.

    python benchmarks/initial_draws.py

All sides build the same model of 136 million parameters, alternately in one process. Writes initial_draws.md and .json
to benchmarks/results.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from paired import HERE, compare, describe_surroundings, random_rounds, surroundings, write_results
from torch import nn

from dure.training.session.initial_draws import InitialDraws

PLAIN, FIRST, AGAIN = "plain", "first build, recorded", "built again, in threads"


def build() -> nn.Module:
    """Return embeddings and pairs of linear layers with their initial weights."""
    torch.manual_seed(0)
    pairs = (nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 512)) for _ in range(60))
    return nn.Sequential(nn.Embedding(20_000, 512), *pairs)


def build_with(draws: InitialDraws) -> nn.Module:
    """Return the same model, by way of a record of its draws."""
    with draws.of_build():
        return build()


def main() -> int:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    record = surroundings()
    known = InitialDraws()
    build_with(known)
    sides: dict[str, Callable[[], nn.Module]] = {
        PLAIN: build,
        FIRST: lambda: build_with(InitialDraws()),
        AGAIN: lambda: build_with(known),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _, name in random_rounds(list(sides), options.rounds, seed=0):
        start = time.perf_counter()
        sides[name]()
        seconds[name].append(time.perf_counter() - start)
    rows = compare(seconds, PLAIN)
    lines = [
        f"| {row.name} | {row.median:.2f} | {row.ratio:.2f} | {row.ratio_low:.2f} to {row.ratio_high:.2f} |\n"
        for row in rows
    ]
    threads = torch.get_num_threads()
    page = (
        f"# The build of a large model\n\n{describe_surroundings(record)}\n\n"
        f"136 million parameters, {options.rounds} builds of each in random order, {threads} threads.\n\n"
        f"| | seconds | ratio, median | ratio, middle half |\n|---|---|---|---|\n{''.join(lines)}"
    )
    write_results(options.results, "initial_draws", {**record, "rows": [asdict(row) for row in rows]}, page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
