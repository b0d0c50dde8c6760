"""Comparison of a whole batch's loss with those of its parts: effects that only begin at its size."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from dure.training.inspection import whole_batch
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


def inspection(loss, parts, **options):
    calls = LossCalls(loss, nn.Linear(4, 2).double(), lambda places: X[list(places)], {}, nullcontext)
    options = {"most_at_once": max(parts), **options}
    return LossInspection(Additivity(calls, is_exact=True, **options), parts=parts)


@pytest.mark.parametrize("parts", [[16, 16], [11, 11, 10], [2] * 16, [14, 18]])
def test_loss_that_leaves_out_samples_of_large_batches_alone_is_found(parts):
    found = inspection(trimmed, parts).traits(96).not_additive
    assert found is not None
    assert "for 32 samples at once, and " in found
    assert found.endswith(f"for the same samples in {len(parts)} parts")


def test_during_training_it_is_found_too():
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
