"""Waits and copies of a training step on simulated devices, counted."""

import itertools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from dure.strategies.state.checksum import checksum, checksums
from tests.conformance.cases import train_case
from tests.conformance.tasks import Regression
from tests.simulated_cuda.devices import on_devices

pytestmark = pytest.mark.simulated

LEAST_USUAL = 0.4
"""Smallest part of the steps that are no more than a step; in the others replicas are compared, or a snapshot made."""


class Counted(Regression):
    """A task that notes in each training call of its loss what its process has asked the devices for so far."""

    num_samples: int = 400
    notes: str = ""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training and torch.is_grad_enabled():
            note(self.notes)
        return super().loss(model, batch)


class CountedUpdates(Regression):
    """A task that notes the same in each step of its optimiser: a section's process calls the loss several times."""

    notes: str = ""

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Noting(model.parameters(), notes=self.notes)


class Noting(SGD):
    """An optimiser that notes its steps."""

    def __init__(self, parameters: Any, notes: str) -> None:
        super().__init__(parameters, lr=0.1)
        self.notes = notes

    def step(self, closure: Any = None) -> Any:
        note(self.notes)
        return super().step(closure)


def note(folder: str) -> None:
    """Write down what this process has asked the devices for so far."""
    with open(Path(folder) / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(torch.cuda.simulated.counts()) + "\n")


def noted_steps(folder: Path) -> list[list[tuple[int, ...]]]:
    """Return what lies between two notes of each process: reads, copies to the host, to the device, waits."""
    found = []
    for file in folder.iterdir():
        counts = [json.loads(line) for line in file.read_text().splitlines()]
        steps = [
            tuple(after[name] - before[name] for name in ("reads", "to_host", "to_device", "waits"))
            for before, after in itertools.pairwise(counts)
        ]
        found.append(steps)
    return found


def check_steps(folder: Path, strategy: str, nproc: int, waits: int) -> None:
    """Check what lies between two calls of the loss."""
    notes = folder / "notes"
    notes.mkdir()
    train_case(folder, Counted(notes=str(notes)), strategy, nproc, device="cuda", global_batch_size=8, samples=240)
    for steps in noted_steps(notes):
        usual, times = Counter(steps).most_common(1)[0]
        # the facts of the step before, for which two events are waited, and the three tensors of a batch
        assert usual == (0, waits - 1, 3, waits), Counter(steps)
        assert times > LEAST_USUAL * len(steps), Counter(steps)


@pytest.mark.parametrize(
    ("strategy", "nproc", "waits"),
    [
        *[(strategy, 2, 2) for strategy in ("dp", "ddp", "zero1", "fsdp", "ring_ddp", "naive_ddp")],
        ("single", 1, 2),
        ("tensor_parallel", 2, 3),  # and for what the ranks have drawn in the step before
    ],
)
def test_step_waits_for_the_step_before_and_copies_its_batch(strategy, nproc, waits, simulated_devices, tmp_path):
    simulated_devices.call(check_steps, tmp_path, strategy=strategy, nproc=nproc, waits=waits)


def check_pipeline(folder: Path) -> None:
    """Check what lies between two steps of the optimiser, on two replicas of two sections."""
    notes = folder / "notes"
    notes.mkdir()
    settings = {"mesh": "data=2,pipeline=2", "microbatch_size": 2, "global_batch_size": 8, "samples": 160}
    train_case(folder, CountedUpdates(notes=str(notes), layered=True), "pipeline", 4, device="cuda", **settings)
    ranks = [[step for step in steps if any(step)] for steps in noted_steps(notes)]
    ranks = [steps for steps in ranks if steps]  # not the process that starts them, which tries the optimiser
    assert len(ranks) == 4
    for steps in ranks:
        # a batch's three tensors for each of two microbatches, or of both at once; four events and nothing else
        assert {(0, 1, 3, 4), (0, 1, 6, 4)} & set(steps), Counter(steps)
        assert min(waits for _, facts, _, waits in steps if facts) <= 4, Counter(steps)


@pytest.mark.timeout(120)
def test_step_of_a_pipeline_waits_for_the_step_before(simulated_devices, tmp_path):
    simulated_devices.call(check_pipeline, tmp_path, devices=4)


@on_devices(1)
def test_checksums_of_tensors_are_waited_for_at_once(folder: Path) -> None:
    tensors = [torch.arange(float(length), device="cuda") for length in (3, 0, 70, 30_000)]
    expected = [checksum([tensor.cpu()]) for tensor in tensors]
    checksums(tensors)
    torch.cuda.simulated.reset_counts()
    assert checksums(tensors) == expected
    assert torch.cuda.simulated.counts()["waits"] == 1
