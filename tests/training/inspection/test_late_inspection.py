"""Inspections of the loss during a run leave the training as it is."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.nn import functional

import dure
from tests.conformance.cases import train_case
from tests.conformance.zoo.feature import STEPS, ZooTask, chain
from tests.conformance.zoo.later import ScheduledMining


class ReadsIterator(ZooTask):
    """Multiplies the loss of each step by the next number of an iterator, which nothing can put back."""

    def build_model(self) -> nn.Module:
        self.factors = iter([1 + step / 10 for step in range(1000)])
        return chain()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return functional.mse_loss(model(x), y) * (next(self.factors) if model.training else 1)


def run(folder: Path, **settings: Any) -> Path:
    common = {**STEPS, "quiet": True, "start": "fork", "device": "cpu", "threads": 1, "samples": 49}
    return Path(dure.train(ReadsIterator(), **common, runs_dir=folder, **settings).run)


def losses_of(run: Path) -> list[float]:
    return [json.loads(line)["loss_sum"] for line in (run / "rank0.jsonl").read_text().splitlines()]


def test_loss_that_could_not_be_tried_before_training_is_not_called_during_it(tmp_path):
    one = run(tmp_path, strategy="single", nproc=1)
    two = run(tmp_path, strategy="ddp", nproc=2, checkpoint={"every_samples": 8})
    assert losses_of(two) == pytest.approx(losses_of(one), rel=1e-12)
    declared = json.loads((two / "summary.json").read_text())["not_preserved"]
    assert [text.partition(":")[0] for text in declared] == ["unknown", "state that no checkpoint holds"]


def test_loss_that_failed_before_training_is_compared_during_it(tmp_path):
    run = train_case(tmp_path, ScheduledMining(), "ddp", 2, **STEPS)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert [text.partition(":")[0] for text in declared] == ["unknown", "the loss is no mean over samples"]
