"""Steps under the wrappers of `dure.parallel` beside torch's DDP: two workers and one parameter server.

    dure run --nproc 3 benchmarks/wrappers.py

All sides take turns in the same processes. Rank 0 writes the page.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from paired import HERE, compare, describe_surroundings, random_rounds, surroundings, write_results
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dure.parallel import ParameterServerDDP, RingDDP

DDP, AGAIN, RING, SERVER = "DDP", "DDP, once more", "RingDDP", "ParameterServerDDP"


def model_of(width: int, depth: int) -> nn.Sequential:
    """Return a model of linear layers."""
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])


def stepper(model: nn.Module, samples: torch.Tensor) -> Callable[[int], None]:
    """Return a function that takes a number of steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def steps(number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad()
            model(samples).square().mean().backward()
            optimizer.step()

    return steps


def measured(served: ParameterServerDDP, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the milliseconds of a step of each side in each round, on a worker."""
    samples = torch.randn(32, options.width)
    group = served.workers
    others = {
        DDP: DistributedDataParallel(model_of(options.width, options.depth), process_group=group),
        AGAIN: DistributedDataParallel(model_of(options.width, options.depth), process_group=group),
        RING: RingDDP(model_of(options.width, options.depth), process_group=group),
    }
    sides = {name: stepper(model, samples) for name, model in [*others.items(), (SERVER, served)]}
    for steps in sides.values():
        steps(options.block)  # warms up
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _, name in random_rounds(list(sides), options.rounds, seed=0):
        dist.barrier(group=group)
        begin = time.perf_counter()
        sides[name](options.block)
        found[name].append((time.perf_counter() - begin) / options.block * 1e3)
    served.close()
    return found


def main() -> int:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--block", type=int, default=10)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    record = surroundings()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    served = ParameterServerDDP(model_of(options.width, options.depth))
    if served.is_server:
        served.serve()
        return 0
    rows = compare(measured(served, options), DDP)
    if dist.get_rank() == 0:
        lines = [
            f"| {row.name} | {row.median:.2f} | {row.ratio:.3f} | {row.ratio_low:.3f} to {row.ratio_high:.3f} |\n"
            for row in rows
        ]
        page = (
            f"# Wrappers for loops written by hand\n\n{describe_surroundings(record)}\n\n"
            f"{options.depth} linear layers of {options.width}, 32 samples on each of two workers, {options.rounds} "
            f"rounds of turns of {options.block} steps. The server is a third process on the same cores.\n\n"
            f"| | ms per step | ratio, median | ratio, middle half |\n|---|---|---|---|\n{''.join(lines)}"
        )
        write_results(options.results, "wrappers", {**record, "rows": [asdict(row) for row in rows]}, page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
