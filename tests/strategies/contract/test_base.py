"""Code that strategies share: weights of losses, counts, clipping, wrong returns."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

import dure
from dure.comm.groups import Solo
from dure.errors import TaskInvalid
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.precision import Precision
from dure.strategies.contract.step_facts import LossTerm, Requests, StepFacts
from dure.strategies.table import STRATEGIES, load_strategy
from tests.specs import spec_of

CPU = torch.device("cpu")


def prepared(loss, *, model=None, name="single", devices=1, group=None, **options):
    """Return a strategy of one process over a linear model without bias whose weights are 1, 2."""
    if model is None:
        model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        model.weight.data = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    strategy = load_strategy(name)(
        StrategyContext(
            STRATEGIES[name], group or Solo(), (CPU,) * devices, Precision("fp32", "cpu"), spec_of(name, **options)
        )
    )
    strategy.prepare(model, lambda m: torch.optim.SGD(m.parameters(), lr=1.0), loss)
    return strategy


def step(strategy, *batches):
    """Run one step of microbatches of vectors; return what it found out."""
    microbatches = [Microbatch(batch=batch, num_samples=len(batch)) for batch in batches]
    total = sum(len(batch) for batch in batches)
    strategy.forward_backward(microbatches, global_samples=total, requests=Requests())
    facts = strategy.sync_gradients()
    answer = facts.read()
    strategy.optimizer_step()
    return answer


def mean_loss(model, batch):
    return model(batch).mean()


ROWS = torch.tensor([[3.0, 4.0], [0.0, 1.0], [6.0, 1.0]], dtype=torch.float64)


@pytest.mark.parametrize("name", ["single", "dp", "balanced_dp"])
def test_step_over_uneven_microbatches_moves_by_the_mean_over_all_samples(name):
    strategy = prepared(mean_loss, name=name)
    loss_sum, count, requests = step(strategy, ROWS[:1], ROWS[1:])
    assert (loss_sum, count, requests) == (11.0 + 2.0 + 8.0, 3, (False, False))
    torch.testing.assert_close(strategy.model.weight, torch.tensor([[1.0, 2.0]]).double() - ROWS.mean(0))
    strategy.close()


@pytest.mark.parametrize("norm", [1.0, 100.0])
def test_clipping_scales_by_the_norm_of_the_whole_batch_gradient(norm):
    strategy = prepared(mean_loss, clip_norm=norm)
    step(strategy, ROWS[:1], ROWS[1:])
    gradient = ROWS.mean(0)
    expected = gradient * min(1.0, norm / (float(gradient.norm()) + 1e-6))
    torch.testing.assert_close(strategy.model.weight, torch.tensor([[1.0, 2.0]]).double() - expected)


def test_clipping_takes_the_norm_of_what_is_stepped():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)).double()
    strategy = load_strategy("single")(
        StrategyContext(
            STRATEGIES["single"], Solo(), (CPU,), Precision("fp32", "cpu"), spec_of("single", clip_norm=0.01)
        )
    )
    strategy.prepare(model, lambda m: torch.optim.SGD(m[1].parameters(), lr=1.0), mean_loss)
    before = model[1].weight.detach().clone()
    step(strategy, 1000 * ROWS)
    assert float((model[1].weight - before).norm().detach()) == pytest.approx(0.01, rel=1e-6)


def weighted(count):
    return lambda model, batch: dure.Sum(model(batch).sum(), count)


@pytest.mark.parametrize(
    ("count", "recorded"),
    [(4, 4), (2.5, 2.5), (torch.tensor(4), 4), (torch.tensor(2.5), 2.5), (np.int64(4), 4)],
    ids=["int", "float", "tensor", "float tensor", "numpy"],
)
def test_a_sum_is_divided_by_its_count_whatever_kind_of_number(count, recorded):
    strategy = prepared(weighted(count))
    loss_sum, loss_count, _ = step(strategy, ROWS)
    assert (loss_sum, loss_count) == (21.0, recorded)
    torch.testing.assert_close(strategy.model.weight, torch.tensor([[1.0, 2.0]]).double() - ROWS.sum(0) / recorded)
    step(strategy, ROWS)  # the expected count follows the true one: the second step must move as far
    torch.testing.assert_close(strategy.model.weight, torch.tensor([[1.0, 2.0]]).double() - 2 * ROWS.sum(0) / recorded)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, batch: 3.0, r"loss returned 3\.0: return a scalar tensor"),
        (lambda model, batch: None, "loss returned None: return a scalar tensor"),
        (lambda model, batch: model(batch), r"loss returned a tensor of shape \(3, 1\): return a scalar tensor"),
        (lambda model, batch: model(batch).mean().detach(), "loss returned a tensor without a gradient: compute it"),
        (lambda model, batch: model(batch).mean().item(), "return a scalar tensor"),
        (lambda model, batch: dure.Sum(3.0, 1), r"loss returned 3\.0"),
        (lambda model, batch: dure.Sum(model(batch).sum(), torch.ones(3)), r"a tensor of shape \(3,\) as count: give"),
        (lambda model, batch: dure.Sum(model(batch).sum(), None), "None as count: give one number"),
        (
            lambda model, batch: dure.Sum(model(batch).square().sum(), model(batch).exp().sum()),
            r"a count that requires a gradient, .* return count.detach\(\)",
        ),
        (lambda model, batch: (model(batch).mean(), {}), "return a scalar tensor"),
    ],
)
def test_a_wrong_loss_is_refused_in_one_sentence(loss, said):
    with pytest.raises(TaskInvalid, match=said):
        step(prepared(loss), ROWS)


def test_gradients_outside_the_optimiser_are_dropped_with_the_others():
    strategy = prepared(mean_loss)
    step(strategy, ROWS)
    assert all(parameter.grad is None for parameter in strategy.model.parameters())


def term(loss=None, count=1):
    return LossTerm(root=loss, loss=loss, factor=1.0, count=count)


def test_facts_tell_a_local_loss_that_is_not_finite_from_a_sum_that_is_not():
    ok, bad = torch.tensor(1.0), torch.tensor(math.nan)
    assert StepFacts((math.nan, 3.0, 0, 0), [term(ok), term(ok)]).is_locally_finite()
    assert not StepFacts((math.nan, 3.0, 0, 0), [term(ok), term(bad)]).is_locally_finite()


@pytest.mark.parametrize(("stop", "save"), [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (3.0, 1.0)])
def test_facts_say_what_any_rank_requested(stop, save):
    facts = StepFacts(torch.tensor([2.5, 3.0, stop, save]), [])
    assert facts.read() == (2.5, 3, Requests(stop > 0, save > 0))


def test_facts_round_a_count_of_whole_items_that_float32_has_worn():
    worn = torch.tensor([1.0, 29.999998, 0.0, 0.0])
    assert StepFacts(worn, [term(count=10)]).read()[1] == 30
    # an idle rank counts nothing, which is whole, and the others weights that add up to little
    assert StepFacts((1.0, 0.0017, 0, 0), [term(count=0)]).read()[1] == 0.0017
    assert StepFacts(worn, [term(count=10), term(count=9.5)]).read()[1] == pytest.approx(29.999998)


def test_not_preserved_speaks_of_what_the_model_has():
    plain = prepared(mean_loss, name="dp", devices=2)
    with_both = prepared(
        mean_loss, name="dp", devices=2, model=nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(), nn.Linear(2, 1))
    )
    alone = prepared(mean_loss, name="dp", model=nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(), nn.Linear(2, 1)))
    said = " ".join(with_both.not_preserved())
    assert plain.not_preserved() == alone.not_preserved() == []
    assert "BatchNorm" in said
    assert "dropout" in said
    for strategy in (plain, with_both, alone):
        strategy.close()


@pytest.mark.parametrize(("name", "dtype"), [("fp32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_precision_computes_the_forward_pass_in_its_dtype(name, dtype):
    precision = Precision(name, "cpu")
    with precision.autocast():
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == (dtype or torch.float32)
    assert isinstance(precision.autocast(), nullcontext) == (dtype is None)
    assert (precision.scaler is not None) == (name == "fp16")


def test_precision_state_goes_through_a_checkpoint_and_into_another_precision():
    fp16, other = Precision("fp16", "cpu"), Precision("fp16", "cpu")
    fp16.scaler.update(512.0)
    other.load_state(fp16.state())
    assert other.scaler.get_scale() == 512.0
    assert Precision("bf16", "cpu").state() == {}
    Precision("bf16", "cpu").load_state(fp16.state())
    other.load_state({})
    assert other.scaler.get_scale() == 512.0
