"""A run that goes on with other ranks, whose task begins to draw random numbers only later."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import dure
from tests.conformance.zoo.feature import STEPS, ZooTask


class NoiseLater(ZooTask):
    """Adds noise to inputs from the thirtieth sample on."""

    noise = 0.0

    def build_schedule(self, optimizer: Any, total_samples: int) -> Any:
        def factor(samples_seen: int) -> float:
            self.noise = 0.1 if samples_seen >= 30 else 0.0
            return 1.0

        return factor

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return functional.mse_loss(model(x + self.noise * torch.randn_like(x) if self.noise else x), y)


def run(resume: Path | None = None, *, samples: int, **settings: Any) -> Path:
    common = {**STEPS, "quiet": True, "start": "fork", "device": "cpu", "threads": 1, "samples": samples, **settings}
    return Path(dure.train(NoiseLater(), **({"resume": resume} if resume else {}), **common).run)


@pytest.mark.parametrize("stops", [(22,), (22, 27)])
def test_draws_when_they_begin_after_ranks_changed_then_it_is_declared(stops, tmp_path):
    first, *others = stops
    folder = run(samples=first, strategy="ddp", nproc=2, runs_dir=tmp_path)
    for end in (*others, 49):
        run(folder, samples=end, strategy="single", nproc=1)
    declared = json.loads((folder / "summary.json").read_text())["not_preserved"]
    assert declared == ["random numbers: begun anew at 22 samples, on other ranks than before"]


def test_draws_when_none_begin_after_ranks_changed_then_nothing_is_declared(tmp_path):
    folder = run(samples=22, strategy="ddp", nproc=2, runs_dir=tmp_path)
    run(folder, samples=27, strategy="single", nproc=1)
    assert json.loads((folder / "summary.json").read_text())["not_preserved"] == []
