"""The outer step: Nesterov momentum from anchor to anchor, undisturbed by readings, kept in checkpoints."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from dure.errors import CheckpointMismatch
from tests.comm.gloo_ranks import on_ranks
from tests.conformance.cases import TO_ROUNDING, largest_difference, train_case, weights_of
from tests.conformance.tasks import Regression
from tests.conformance.test_resume import SETTINGS, back_to, resumed
from tests.strategies.local_sgd.local_steps import ByHand, prepared, step

STEPS = {"global_batch_size": 7, "samples": 130, "clip_norm": 0.4, "seed": 5}
ROWS = torch.arange(1.0, 15.0, dtype=torch.float64).view(7, 2)


class Outer:
    """The outer step by hand, for one model: v = mu v + (anchor - mean); anchor -= lr (anchor - mean + mu v)."""

    def __init__(self, model: nn.Module, lr: float, momentum: float) -> None:
        self.lr, self.momentum = lr, momentum
        self.anchors = [parameter.detach().clone() for parameter in model.parameters()]
        self.velocity = [torch.zeros_like(anchor) for anchor in self.anchors]

    @torch.no_grad()
    def step(self, model: nn.Module) -> None:
        for anchor, velocity, parameter in zip(self.anchors, self.velocity, model.parameters(), strict=True):
            gradient = anchor - parameter
            velocity.mul_(self.momentum).add_(gradient)
            anchor.sub_(self.lr * (gradient + self.momentum * velocity))
            parameter.copy_(anchor)


@pytest.mark.parametrize(
    ("num_ranks", "optimizer", "options", "lr", "momentum"),
    [(3, "adamw", {}, 0.7, 0.9), (2, "sgd", {"outer_lr": 0.5, "outer_momentum": 0.0}, 0.5, 0.0)],
    ids=["default", "given"],
)
def test_weights_equal_those_of_as_many_models_with_an_outer_step_by_hand(
    num_ranks, optimizer, options, lr, momentum, tmp_path
):
    """Steps 7 and 14 are the ends of epochs: their checkpoints average between two outer steps."""
    task = Regression(kind="tokens", optimizer=optimizer)
    run = train_case(tmp_path, task, "diloco", num_ranks, average_every=3, **options, **STEPS)
    by_hand = ByHand(task, num_ranks, STEPS)
    outer = {id(model): Outer(model, lr, momentum) for model in by_hand.models}
    expected = by_hand.train(every=3, outer=lambda model: outer[id(model)].step(model))
    assert largest_difference(weights_of(run), expected) < TO_ROUNDING


@pytest.mark.slow
def test_an_outer_rate_of_one_without_momentum_is_averaging(tmp_path):
    averaged = weights_of(train_case(tmp_path, Regression(), "averaging", 3, average_every=4, **STEPS))
    plain = {"outer_lr": 1.0, "outer_momentum": 0.0}
    run = train_case(tmp_path, Regression(), "diloco", 3, average_every=4, **plain, **STEPS)
    assert largest_difference(weights_of(run), averaged) < TO_ROUNDING


def test_warm_up_moves_the_anchor_to_where_it_ends():
    def work(group):
        model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        strategy = prepared("diloco", group, model, lambda m: SGD(m.parameters(), lr=0.1), warmup_steps=2)
        seen = []
        for _ in range(3):
            seen.append(model.weight.detach().clone())
            step(strategy, ROWS)
        (anchor,) = strategy._anchors
        return torch.equal(anchor, seen[2]), torch.equal(seen[1], seen[2])

    assert on_ranks(2, work) == [(True, False)] * 2


class Source:
    """A checkpoint of a linear model, with an anchor."""

    def __init__(self, own):
        self.own = own
        self.position = type("Position", (), {"step": 8})

    def load_model(self, model, *, is_part=False): ...

    def load_optimizer(self, model, optimizer, *, whole=None): ...


def loaded(own):
    """Return anchor and momentum of a strategy that has loaded this, or its error."""

    def work(group):
        model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        strategy = prepared("diloco", group, model, lambda m: SGD(m.parameters(), lr=0.1))
        strategy.load_state_dict(Source(own))
        momentum = strategy._outer_state().get("momentum", {})
        return [a.tolist() for a in strategy._anchors], {name: tensor.tolist() for name, tensor in momentum.items()}

    return on_ranks(1, work)[0]


def test_an_anchor_of_another_model_is_refused():
    with pytest.raises(CheckpointMismatch, match="its diloco anchor and what this model trains differ in bias"):
        raise loaded({"anchor": {"weight": torch.ones(1, 2), "bias": torch.ones(1)}, "momentum": {}})


def test_a_checkpoint_without_an_anchor_begins_without():
    assert loaded({}) == ([], {})


@pytest.mark.parametrize("momentum", [{}, {"weight": torch.full((1, 2), 3.0).double()}], ids=["none", "some"])
def test_anchor_and_momentum_go_through_a_checkpoint(momentum):
    found = loaded({"anchor": {"weight": torch.full((1, 2), 2.0).double()}, "momentum": momentum})
    assert found == ([[[2.0, 2.0]]], {"weight": [[3.0, 3.0]]} if momentum else {})


@pytest.mark.slow
@pytest.mark.parametrize("samples", [28, 44])
def test_its_checkpoint_goes_on_under_averaging_and_back(samples, tmp_path):
    whole = train_case(tmp_path, Regression(), "diloco", 2, average_every=3, **SETTINGS)
    run = back_to(whole, samples, tmp_path)
    resumed(run, strategy="averaging", samples=88 + 14, epochs=None)
    resumed(run, strategy="diloco", nproc=3, samples=132, epochs=None)
    assert all(tensor.isfinite().all() for tensor in weights_of(run).values())
