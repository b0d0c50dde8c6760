"""Cases of the battery: starting one, and reading its run."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import dure
from dure.strategies.table import STRATEGIES
from tests.specs import grouped

LAYERED: frozenset[str] = frozenset({"model_parallel", "pipeline", "rpc_model"})
"""Strategies that divide a model and so are given one of several layers and no tied weight."""

PAIRS = [
    (name, num_devices)
    for name, info in STRATEGIES.items()
    for num_devices in ((1, 2, 3) if info.many_devices else (1,))
    if info.is_exact
]
"""Every exact strategy of the table on one, two and three devices: being in the table is being in the battery."""

ALWAYS = ("single", "dp", "balanced_dp", "ddp")
"""Strategies that every test of the battery has every time. Of the others one case on three devices is; the rest is
among the slow tests, for a dozen strategies take their time."""


def places(pairs: Iterable[tuple[str, int]], *more: object) -> list[Any]:
    """Return parameters of a test, the less telling ones marked as slow; each with `more` values behind it."""
    return [pytest.param(*pair, *more, marks=[] if pair[0] in ALWAYS else pytest.mark.slow) for pair in pairs]


def crossed(pairs: Iterable[tuple[str, int]], values: Sequence[tuple[object, ...]]) -> list[Any]:
    """Return places with values behind them: all of them for `single` and `ddp`, for the others the next one in turn.

    For what does not depend on the strategy, so that to cross both would only take time.
    """
    in_turn = cycle(values)
    return [
        place
        for pair in pairs
        for value in (values if pair[0] in ("single", "ddp") else [next(in_turn)])
        for place in places([pair], *value)
    ]


TELLING_PAIRS = [pair for pair in PAIRS if pair[0] == "single" or pair[1] == 3]
"""Pairs without the less telling numbers of devices: three share a batch of 7 or 44 unevenly, one or two add little.

The weights after 20 steps are tested on every pair."""
TELLING = places(TELLING_PAIRS)
MANY_PAIRS = [pair for pair in TELLING_PAIRS if pair[1] > 1]
MANY = places(MANY_PAIRS)

TO_ROUNDING = 1e-10
"""Float64 sums of a few hundred terms in another order differ by about 1e-16 each; 20 steps amplify that little."""

_numbers = count()


def train_case(
    folder: Path, task: "dure.Task | type[dure.Task]", strategy: str = "single", nproc: int = 1, **settings: Any
) -> Path:
    """Train a task in forked processes and return the run's folder; the strategy's options stand among the settings."""
    name = f"{next(_numbers)}-{strategy}-{nproc}"
    usual = {"quiet": True, "start": "fork", "device": "cpu", "eval_every_epochs": 1e6, "threads": 1, "max_restarts": 0}
    usual["checkpoint"] = {"every_samples": 10**9}  # only at the end: before each, a rank inspects the loss
    settings = grouped(strategy, usual | settings)
    summary = dure.train(task, strategy=strategy, nproc=nproc, runs_dir=folder, name=name, **settings)
    assert summary.status == "completed"
    return Path(summary.run)


def is_layered(strategy: str) -> bool:
    """Return whether a strategy's task needs the layered model."""
    return strategy in LAYERED


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
    """Return whether two sets of weights are equal bit by bit."""
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
    """Return the digests of all weights that were evaluated: those of the tensor that was seen in most states.

    Ranks that hold parts of a model are compared where they hold the same.
    """
    seen = defaultdict(set)
    for file in sorted(folder.iterdir()):
        for line in file.read_text().splitlines():
            for name, digest in json.loads(line).items():
                seen[name].add(digest)
    return max(seen.values(), key=len)
