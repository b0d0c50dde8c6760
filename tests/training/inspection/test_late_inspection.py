"""Inspections of the loss during a run leave the training as it is."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

import dure
from dure.training.inspection import whole_batch
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


class MixesLater(ZooTask):
    """A model that subtracts a part of the batch's mean once training has moved its weights."""

    def build_model(self) -> nn.Module:
        return MixingLayers(chain())

    def build_optimizer(self, model: nn.Module) -> SGD:
        return SGD(model.parameters(), lr=0.1)


class MixingLayers(nn.Module):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.first = self.layers[0].bias.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        output = self.layers(x)
        return output - 0.1 * output.mean(0) if (self.layers[0].bias - self.first).norm() > 1e-3 else output


class ScalesLater(ZooTask):
    """A model that scales its gradient by the size of the batch once training has moved its weights far."""

    def build_model(self) -> nn.Module:
        return ScalingLayers(chain())

    def build_optimizer(self, model: nn.Module) -> SGD:
        return SGD(model.parameters(), lr=0.1)


class ScalingLayers(MixingLayers):
    def forward(self, x: Tensor) -> Tensor:
        output = self.layers(x)
        if (self.layers[0].bias - self.first).norm() < 2e-2:
            return output
        kept, scale = output.detach(), len(output) ** -0.5
        return kept * (1 - scale) + output * scale


def test_model_that_scales_its_gradient_later_is_declared_where_its_calls_are_divided(tmp_path, monkeypatch):
    monkeypatch.setattr(whole_batch, "_DURING_TRAINING_SECONDS", 60.0)
    run = train_case(tmp_path, ScalesLater(), "dp", 2, **STEPS)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert any("the gradient of layers." in text and " steps)" in text for text in declared), declared


def test_model_that_mixes_samples_later_is_declared_where_its_calls_are_divided(tmp_path, monkeypatch):
    monkeypatch.setattr(whole_batch, "_DURING_TRAINING_SECONDS", 60.0)
    run = train_case(tmp_path, MixesLater(), "dp", 2, **STEPS)
    compared, inspected = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert "differ from those of one process" in compared  # it mixes from the second step on
    assert "the model's outputs for 5 samples at once are others" in inspected
