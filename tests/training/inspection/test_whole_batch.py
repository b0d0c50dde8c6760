"""Comparison of a whole batch's loss with those of its parts: effects that only begin at its size."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dure.training.inspection import additivity, whole_batch
from dure.training.inspection.additivity import Additivity
from dure.training.inspection.loss_calls import LossCalls
from dure.training.inspection.loss_inspection import LossInspection

X = torch.randn(96, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
CALLED: list[int] = []


def trimmed(model, x):
    """Leave out the worst 5 % of a batch: one of 32 samples, and none of 16."""
    losses = model(x).square().mean(1)
    return losses.sort().values[: len(x) - int(0.05 * len(x))].mean()


def mean(model, x):
    CALLED.append(len(x))
    return model(x).square().mean()


def penalised(model, x):
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return trimmed(model, x) + gradient.square().mean()


def drawing(model, x):
    return mean(model, x + 0.1 * torch.randn(len(x), 4, dtype=x.dtype) ** 3)


class Limited(nn.Linear):
    """Expert that has room for twelve of a batch's samples."""

    def forward(self, x):
        return super().forward(x) * (torch.arange(len(x)) < 12)[:, None]


def inspection(loss, parts, model_parts=(), model=nn.Linear, **options):
    calls = LossCalls(loss, model(4, 2).double(), lambda places: X[list(places)], {}, nullcontext)
    options = {"most_at_once": max(parts), **options}
    return LossInspection(Additivity(calls, is_exact=True, **options), parts=parts, model_parts=model_parts)


@pytest.mark.parametrize("parts", [[16, 16], [11, 11, 10], [2] * 16, [14, 18]])
def test_loss_that_leaves_out_samples_of_large_batches_alone_is_found(parts):
    found = inspection(trimmed, parts).traits(96).not_additive
    assert found is not None
    assert "for 32 samples at once, and " in found
    assert found.endswith(f"for the same samples in {len(parts)} parts")


def test_during_training_it_is_found_too(monkeypatch):
    for module in (additivity, whole_batch):  # a busy machine has no time for it
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0))
    figures, _ = inspection(trimmed, [16, 16]).late_difference(0, 96)
    assert "for 32 samples at once" in figures


@pytest.mark.parametrize("loss", [mean, drawing, penalised])
def test_loss_that_is_a_mean_or_draws_or_needs_gradients_is_not_blamed(loss):
    assert inspection(loss, [16, 16]).traits(96).not_additive is None


def test_batch_for_which_memory_may_not_suffice_is_not_computed():
    CALLED.clear()
    assert inspection(mean, [2] * 40).traits(96).not_additive is None
    assert max(CALLED) < 80


def test_batch_that_takes_too_long_is_not_computed(monkeypatch):
    monkeypatch.setattr(whole_batch, "_BEFORE_TRAINING_SECONDS", 0.0)
    assert inspection(trimmed, [16, 16]).traits(96).not_additive is None


def test_batch_of_more_samples_than_there_are_is_not_computed():
    assert inspection(trimmed, [16, 16]).traits(31).not_additive is None


def test_model_that_mixes_samples_of_large_batches_alone_is_found_where_its_calls_are_divided():
    found = inspection(mean, [24], [12, 12], Limited)
    assert found.traits(96).model_not_additive
    figures, end = found.late_difference_of_model(0, 96)
    assert figures == "the model's outputs for 24 samples at once are others than for the same samples in 2 parts"
    assert end == 24


def test_model_of_which_each_output_is_of_one_sample_is_not_blamed():
    found = inspection(mean, [24], [12, 12])
    assert not found.traits(96).model_not_additive
    assert found.late_difference_of_model(0, 96)[0] is None
    assert not inspection(mean, [24], model=Limited).traits(96).model_not_additive  # its calls are not divided
