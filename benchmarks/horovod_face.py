"""Cost of Horovod's face: a small named allreduce beside `all_reduce`, and its optimiser beside DDP.

    dure run --nproc 2 benchmarks/horovod_face.py

Both sides are measured in turns in the same processes. Rank 0 prints the medians and the ratios.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dure.compat.horovod.torch as hvd


def medians(sides: dict[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds per call of each side in each round."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, call in sides.items():
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(repeats):
                call()
            if turn:  # the first warms up
                found[name].append((time.perf_counter() - begin) / repeats)
    return found


def show(what: str, found: dict[str, list[float]]) -> None:
    """Print the medians, and the ratio with its spread over rounds."""
    (name, theirs), (own_name, ours) = found.items()
    ratios = sorted(mine / other for other, mine in zip(theirs, ours, strict=True))
    if hvd.rank() == 0:
        print(
            f"{what}: {name} {statistics.median(theirs) * 1e3:.2f} ms, {own_name} {statistics.median(ours) * 1e3:.2f} "
            f"ms, ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


def model_of(width: int, depth: int) -> nn.Sequential:
    """Return a model of linear layers, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=8)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    hvd.init()
    small, other = torch.ones(256), torch.ones(256)
    sides: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(small),
        "hvd.allreduce_": lambda: hvd.allreduce_(other, name="small", op=hvd.Max),
    }
    show("1 KiB", medians(sides, arguments.rounds, 50))

    samples = torch.randn(32, arguments.width)
    wrapped = DistributedDataParallel(model_of(arguments.width, arguments.depth))
    plain = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    model = model_of(arguments.width, arguments.depth)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())

    def step(network: nn.Module, by: torch.optim.Optimizer) -> None:
        by.zero_grad()
        network(samples).square().mean().backward()
        by.step()

    steps: dict[str, Callable[[], object]] = {
        "DDP": lambda: step(wrapped, plain),
        "DistributedOptimizer": lambda: step(model, optimizer),
    }
    show(f"step of {arguments.depth} layers of {arguments.width}", medians(steps, arguments.rounds, 10))
    hvd.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
