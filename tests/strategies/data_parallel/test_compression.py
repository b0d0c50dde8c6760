"""Errors that compression carries from step to step: across skipped steps, resumed runs and changing counts."""

import math

import pytest
import torch
from torch import nn

from dure.records.sums import Sum
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.precision import Precision
from dure.strategies.contract.step_facts import NO_REQUESTS
from dure.strategies.data_parallel.compression import TopK
from dure.strategies.data_parallel.compression_hooks import PowerSGD
from dure.strategies.table import STRATEGIES, load_strategy
from tests.comm.gloo_ranks import on_ranks
from tests.commands import RunFiles
from tests.conformance.cases import train_case, weights_of
from tests.conformance.test_skipped_steps import STEPS, Poisoned
from tests.specs import spec_of

CARRYING = [("ddp", "topk"), ("ddp", "int8"), ("ddp", "powersgd"), ("ring_ddp", "topk"), ("ring_ddp", "int8")]
BATCH = 4


def squared_error(model, batch):
    rows, targets = batch
    return (model(rows) - targets).square().mean()


def summed_error(model, batch):
    """Count the rows' first elements as items, so that steps have counts of their own."""
    rows, targets = batch
    weights = rows[:, :1].abs().round() + 1
    return Sum(((model(rows) - targets).square() * weights).sum(), weights.sum())


def strategy_on(group, name, compression, loss=squared_error, **options):
    torch.manual_seed(0)
    strategy = load_strategy(name)(
        StrategyContext(STRATEGIES[name], group, (torch.device("cpu"),), Precision("fp32", "cpu"),
        spec_of(name, compression=compression, compression_fraction=0.1, on_nonfinite="skip", **options)),
    )  # fmt: skip
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    strategy.prepare(model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), loss)
    return strategy


def batch_of(number, rank, world_size):
    """Return a rank's share; a negative number stands for a batch that is not finite on rank 1."""
    draw = torch.Generator().manual_seed(abs(number))
    rows, targets = (torch.randn(BATCH * world_size, n, generator=draw, dtype=torch.float64) for n in (8, 2))
    mine = slice(rank * BATCH, (rank + 1) * BATCH)
    if number < 0 and rank == 1:
        rows[mine] = float("nan")
    return rows[mine] * (1 + number % 3), targets[mine]


def train(group, strategy, numbers):
    """Make a step of each batch, or skip it as the loop does; return what every step measured."""
    measured = []
    for number in numbers:
        microbatch = Microbatch(batch=batch_of(number, group.rank, group.world_size), num_samples=BATCH)
        strategy.forward_backward([microbatch], global_samples=BATCH * group.world_size, requests=NO_REQUESTS)
        loss, count, _ = strategy.sync_gradients().read()
        if math.isfinite(loss):
            strategy.optimizer_step()
            strategy.expect(count)
        else:
            strategy.skip_step()
        measured.append(strategy.measured())
    return measured


def state_of(strategy):
    return {
        **{f"weight {name}": tensor for name, tensor in strategy.model.state_dict().items()},
        **({} if strategy.carried is None else strategy.carried.rank_state()),
    }


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("loss", [squared_error, summed_error])
@pytest.mark.parametrize(("name", "compression"), CARRYING)
def test_step_when_skipped_then_weights_and_errors_are_as_if_it_had_not_been(name, compression, loss):
    def work(group):
        without, skipping = (strategy_on(group, name, compression, loss) for _ in range(2))
        train(group, without, [1, 2, 3, 4, 5])
        measured = train(group, skipping, [-9, 1, -8, 2, -7, -6, 3, 4, -5, 5])
        states = state_of(without), state_of(skipping)
        without.close()
        skipping.close()
        return equal(*states), all(math.isfinite(value) for one in measured for value in one.values())

    assert on_ranks(2, work) == [(True, True)] * 2


@pytest.mark.parametrize("compression", ["topk", "int8", "powersgd"])
def test_run_when_it_skips_steps_then_its_checkpoint_is_finite_to_the_end(compression, tmp_path):
    task = Poisoned(layered=True, dtype="float32")
    run = train_case(tmp_path, task, "ddp", 2, compression=compression, **STEPS)
    assert len(RunFiles(run).events("step_skipped")) == 2
    assert all(bool(tensor.isfinite().all()) for tensor in weights_of(run).values())
    errors = [record["measured"]["compression_error"] for record in RunFiles(run).records(0)]
    assert all(math.isfinite(error) for error in errors)


def test_residual_when_counts_change_then_it_stays_the_same_sum_of_losses():
    def work(group):
        topk = TopK(None, 0.01)
        vector = torch.arange(100.0, dtype=torch.float64)
        topk.begin_step()
        topk.reduce_mean(vector.clone(), 0)
        topk.unit = 64.0
        left_out = topk.residuals[0].clone()
        topk.begin_step(256.0)  # losses are divided by four times as much from now on
        return torch.equal(topk.residuals[0], left_out / 4)

    assert on_ranks(1, work) == [True]


@pytest.mark.parametrize(("saved", "taken"), [("topk", "powersgd"), ("powersgd", "topk"), ("powersgd", "int8")])
def test_errors_when_another_compression_left_them_then_they_are_not_taken_over(saved, taken):
    def work(group):
        one, other = strategy_on(group, "ddp", saved), strategy_on(group, "ddp", taken)
        train(group, one, [1, 2, 3])
        before = {name: tensor.clone() for name, tensor in other.carried.rank_state().items()}
        other.carried.load_rank_state(one.carried.rank_state())
        is_same = equal(before, other.carried.rank_state())
        train(group, other, [4, 5, 6])
        one.close()
        other.close()
        return is_same

    assert on_ranks(2, work) == [True, True]


def test_powersgd_when_resumed_with_another_rank_then_its_factors_begin_anew():
    def work(group):
        one = strategy_on(group, "ddp", "powersgd", compression_rank=1)
        other = strategy_on(group, "ddp", "powersgd", compression_rank=2)
        train(group, one, [1, 2, 3])
        other.carried.load_rank_state(one.carried.rank_state())
        train(group, other, [4, 5, 6, 7])
        one.close()
        other.close()
        return True

    assert on_ranks(2, work) == [True, True]


class Elsewhere:
    """Stands for an accelerator: the meta device refuses tensors of the host as CUDA does."""

    device = torch.device("meta")


def test_residual_from_a_checkpoint_then_it_follows_the_gradients_to_their_device():
    def work(group):
        topk = TopK(None, 0.01)
        topk.load_rank_state({"residual.0": torch.ones(5)})
        return topk._wanted(torch.zeros(5, device=Elsewhere.device), 0).device.type

    assert on_ranks(1, work) == ["meta"]


def test_powersgd_state_from_a_checkpoint_then_it_follows_the_gradients_to_their_device():
    def work(group):
        powersgd = PowerSGD(torch.distributed.group.WORLD, 1)
        kept = {f"{name}.{index}": torch.ones(5) for name in ("error", "p", "q") for index in (0, 1)}
        powersgd.load_rank_state({"iteration": torch.tensor(7), "rank": torch.tensor(1), **kept})
        powersgd._fit(0, torch.zeros(5, device=Elsewhere.device))
        powersgd._fit(1, torch.zeros(6, device=Elsewhere.device))  # a bucket of another size: nothing of it fits
        return {name: tensor.device.type for name, tensor in powersgd.rank_state().items()}

    (devices,) = on_ranks(1, work)
    assert devices == {
        "iteration": "cpu", "rank": "cpu", "error.0": "meta", "p.0": "meta", "q.0": "meta",
    }  # fmt: skip
