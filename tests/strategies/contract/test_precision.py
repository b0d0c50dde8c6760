"""Precision: whether gradients of fp16 have overflowed follows from the scale, without a look at each step."""

import pytest
import torch
from torch import nn

from dure.strategies.contract.precision import Precision

GROWTH_INTERVAL = 4


def precision_with_steps(gradients, precision=None):
    """Return fp16's precision after a step for each gradient."""
    precision = precision or Precision("fp16", "cpu")
    precision.scaler.set_growth_interval(GROWTH_INTERVAL)
    precision._scale["growth_interval"] = GROWTH_INTERVAL
    weight = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for gradient in gradients:
        weight.grad = torch.tensor(gradient)
        precision.unscale(optimizer)
        precision.step(optimizer)
    return precision


@pytest.mark.parametrize("num_steps", [0, 1, 4, 9])
def test_steps_that_do_not_overflow_are_none_that_did_however_often_the_scale_grows(num_steps):
    assert not precision_with_steps([1.0] * num_steps).has_overflowed()


@pytest.mark.parametrize("place", [0, 3, 4, 8])
def test_overflow_is_known_after_further_steps_and_a_checkpoint(place):
    gradients = [1.0] * 9
    gradients[place] = float("inf")
    precision = precision_with_steps(gradients)
    assert precision.has_overflowed()
    loaded = Precision("fp16", "cpu")
    loaded.load_state(precision.state())
    assert precision_with_steps([1.0] * 5, loaded).has_overflowed()


def test_scale_is_loaded_without_an_overflow_from_checkpoints_of_both_versions():
    state = precision_with_steps([1.0] * 6).state()
    assert state.pop("has_overflowed") is False
    for saved in (state, {**state, "has_overflowed": False}):
        loaded = Precision("fp16", "cpu")
        loaded.load_state(saved)
        assert loaded.scaler.get_scale() == 2**17
        assert not precision_with_steps([1.0] * 7, loaded).has_overflowed()


def test_other_precisions_never_overflow():
    precision = Precision("bf16", "cpu")
    precision.update()
    assert (precision.has_overflowed(), precision.state()) == (False, {})
