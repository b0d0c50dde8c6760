"""Phases that a schedule begins: what the loss does in them is found before training, and nothing stays behind."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dure.training.inspection.additivity import Additivity
from dure.training.inspection.loss_calls import LossCalls
from dure.training.inspection.loss_inspection import LossInspection
from dure.training.inspection.phases import Phases, positions_of

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
POSITIONS = positions_of(320, 80, 10)


class Observer(nn.Module):
    """Follows the largest value of its input while it is on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.ones((), dtype=torch.float64))
        self.is_on = False

    def forward(self, x):
        if self.is_on and self.training:
            self.largest.lerp_(x.detach().abs().max(), 0.2)
        return x * self.largest


def mean(model, x):
    return model(x).square().mean()


def variance(model, x):
    return model(x).var(0, correction=0).sum()


def half(model, x):
    return 0.5 * mean(model, x)


def decayed(model, x):
    for parameter in model.parameters():
        parameter.data.mul_(0.98)
    return mean(model, x)


def halved_by_gradients(model, x):
    return mean(model, x) * (1.0 if next(model.parameters()).grad is None else 0.5)


def normalised(model, x):
    output = model(x)
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient / (1e-9 + gradient.norm()))
    return output.square().mean()


def hooking(model, x):
    next(model.parameters()).register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return mean(model, x)


def noisy(model, x):
    return mean(model, x + torch.randn_like(x))


def failing(model, x):
    raise KeyError("no state yet")


def in_phase(loss, condition, layer=None, set_state=None):
    """Return the traits before training of a loss that is another one where a schedule says so, and the calls of it."""
    task = SimpleNamespace(is_on=False, seen=0)
    torch.manual_seed(0)
    model = nn.Sequential(*([layer] if layer else []), nn.Linear(4, 2)).double()
    calls = []

    def either(model, x):
        calls.append(len(x))
        return (loss if task.is_on else mean)(model, x)

    def schedule(seen):
        (set_state or default)(task, seen)
        return 1.0

    def default(task, seen):
        task.is_on = condition(seen)

    calls_of_loss = LossCalls(either, model, lambda places: X[list(places)], {"task": task}, nullcontext)
    inspection = LossInspection(Additivity(calls_of_loss, is_exact=True))
    known = inspection.traits(len(X))
    calls.clear()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = Phases(model, {"task": task}, lambda: schedule, POSITIONS).traits(inspection, len(X), known)
    assert (task.is_on, task.seen) == (False, 0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return found, known, calls


def from_160(seen):
    return seen >= 160


@pytest.mark.parametrize("condition", [from_160, lambda seen: 100 <= seen < 130, lambda seen: seen == 310])
def test_phase_in_which_the_loss_compares_samples_is_found_with_its_beginning(condition):
    found, known, _ = in_phase(variance, condition)
    begin = next(seen for seen in POSITIONS if condition(seen))
    assert known.not_additive is None
    assert f"with the state that the schedule sets at {begin} samples" in found.not_additive


@pytest.mark.parametrize(
    ("loss", "trait"),
    [
        (decayed, "repeated_writes"),
        (halved_by_gradients, "uses_gradients"),
        (normalised, "not_additive"),
        (normalised, "nonlinear_gradients"),
        (hooking, "hooked_by_loss"),
        (noisy, "draws"),
        (failing, "unknown_phase"),
    ],
)
def test_trait_that_the_loss_has_in_a_phase_alone_is_found(loss, trait):
    found, known, _ = in_phase(loss, from_160)
    assert not getattr(known, trait)
    assert getattr(found, trait)


@pytest.mark.parametrize("is_failing", [False, True])
def test_phases_in_which_the_loss_has_other_weights_learn_no_statistics(is_failing):
    def note(task, seen):
        task.is_on, task.seen = seen >= 10, seen
        calls.task = task

    def weighted(model, x):
        if is_failing:
            raise KeyError("no state yet")
        return mean(model, x) * (1 + calls.task.seen)

    calls = SimpleNamespace()
    found, known, _ = in_phase(weighted, None, set_state=note)
    assert (known.learns_statistics, found.learns_statistics) == (False, False)


def test_observer_that_a_schedule_switches_on_is_found():
    layer = Observer()

    def switch(task, seen):
        layer.is_on = 100 <= seen < 130

    found, known, _ = in_phase(mean, None, layer, switch)
    assert (known.learned_buffers, found.learned_buffers) == ((), ("0.largest",))
    assert not layer.is_on


def test_phase_of_a_loss_that_reads_the_position_itself_is_found():
    def note(task, seen):
        task.seen, task.is_on = seen, 100 <= seen < 130

    assert in_phase(variance, None, set_state=note)[0].not_additive


@pytest.mark.parametrize("condition", [from_160, lambda seen: seen % 20 == 0])
def test_phase_with_another_mean_over_samples_has_no_traits(condition):
    found, known, _ = in_phase(half, condition)
    assert found.phases
    assert replace(found, phases=()) == known


def test_state_that_the_loss_does_not_read_costs_a_few_calls_and_none_at_all_costs_none():
    def count(task, seen):
        task.seen = seen

    found, known, calls = in_phase(mean, None, set_state=count)
    assert found == known
    assert len(calls) <= 2 * (len(POSITIONS) + 1)
    assert in_phase(mean, None, set_state=lambda task, seen: None)[2] == []


def test_positions_are_those_before_steps():
    assert positions_of(60, 22, 5) == [0, 5, 10, 15, 20, 22, 27, 32, 37, 42, 44, 49, 54, 59]
    many = positions_of(10**9, 10**6, 100)
    assert (len(many), many[0], many[-1]) == (33, 0, 10**9 - 100)
