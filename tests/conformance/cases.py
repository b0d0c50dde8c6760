"""How the battery runs a case, and what it reads from a run."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

import dure
from dure.strategies import STRATEGIES

PLACES = [
    (name, num_devices)
    for name, info in STRATEGIES.items()
    for num_devices in ((1, 2, 3) if info.many_devices else (1,))
]
"""Every strategy of the table on one, two and three devices: a new one is in the battery by being in the table."""

MANY = [(name, num_devices) for name, num_devices in PLACES if num_devices > 1]

TO_ROUNDING = 1e-10
"""Float64 sums of a few hundred terms in another order differ by about 1e-16 each; 20 steps amplify that little."""

_numbers = count()


def train_case(
    folder: Path, task: "dure.Task | type[dure.Task]", strategy: str = "single", nproc: int = 1, **settings: Any
) -> Path:
    """Train a task in forked processes and return the run's folder."""
    name = f"{next(_numbers)}-{strategy}-{nproc}"
    settings = {"quiet": True, "start": "fork", "device": "cpu", "eval_every_epochs": 1e6, "threads": 1} | settings
    summary = dure.train(task, strategy=strategy, nproc=nproc, runs_dir=folder, name=name, **settings)
    assert summary.status == "completed"
    return Path(summary.run)


def weights_of(run: Path) -> dict[str, Tensor]:
    """Return the weights at the end of a run."""
    file = run / "weights.safetensors"
    dure.export(run, file)
    return load_file(file)


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest absolute difference between two sets of weights of the same names."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def are_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two sets of weights are equal bit by bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def records_of(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Return a rank's step records."""
    return [json.loads(line) for line in (run / f"rank{rank}.jsonl").read_text().splitlines()]


def losses_of(run: Path) -> list[float]:
    """Return the mean loss of every step."""
    return [record["loss_sum"] / record["loss_count"] for record in records_of(run)]


def samples_by_epoch(run: Path) -> Iterator[list[int]]:
    """Yield the data indices of each epoch that all ranks together used, sorted."""
    epochs: dict[int, list[int]] = {}
    for file in sorted(run.glob("rank*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            epochs.setdefault(record["epoch"], []).extend(record["samples"])
    for epoch in sorted(epochs):
        yield sorted(epochs[epoch])


def evaluated_digests(folder):
    """Return the digests of all weights that were evaluated; rank 0's first is of the rehearsal before training."""
    lines = {file.name: file.read_text().splitlines() for file in folder.iterdir()}
    return {line for name, found in lines.items() for line in (found[1:] if name == "rank0" else found)}
