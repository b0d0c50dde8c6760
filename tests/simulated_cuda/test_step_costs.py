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

from tests.conformance.cases import train_case
from tests.conformance.tasks import Regression

pytestmark = pytest.mark.simulated

LEAST_USUAL = 0.4
"""Smallest part of the steps that are no more than a step; in the others replicas are compared, or a snapshot made."""


class Counted(Regression):
    """A task that notes in each training call of its loss what its process has asked the devices for so far."""

    num_samples: int = 400
    notes: str = ""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training and torch.is_grad_enabled():
            with open(Path(self.notes) / f"{os.getpid()}.jsonl", "a") as file:
                file.write(json.dumps(torch.cuda.simulated.counts()) + "\n")
        return super().loss(model, batch)


def check_steps(folder: Path, strategy: str, nproc: int, waits: int) -> None:
    """Check what lies between two calls of the loss."""
    notes = folder / "notes"
    notes.mkdir()
    train_case(folder, Counted(notes=str(notes)), strategy, nproc, device="cuda", global_batch_size=8, samples=240)
    for file in notes.iterdir():
        counts = [json.loads(line) for line in file.read_text().splitlines()]
        steps = [
            tuple(after[name] - before[name] for name in ("reads", "to_host", "to_device", "waits"))
            for before, after in itertools.pairwise(counts)
        ]
        usual, times = Counter(steps).most_common(1)[0]
        # the facts of the step before, for which two events are waited, and the three tensors of a batch
        assert usual == (0, waits - 1, 3, waits), Counter(steps)
        assert times > LEAST_USUAL * len(steps), Counter(steps)


@pytest.mark.parametrize(
    ("strategy", "nproc", "waits"),
    [
        *[(strategy, 2, 2) for strategy in ("dp", "ddp", "zero1", "fsdp", "ring_ddp")],
        ("single", 1, 2),
        ("tensor_parallel", 2, 3),  # and for what the ranks have drawn in the step before
    ],
)
def test_step_waits_for_the_step_before_and_copies_its_batch(strategy, nproc, waits, simulated_devices, tmp_path):
    simulated_devices.call(check_steps, tmp_path, strategy=strategy, nproc=nproc, waits=waits)
