"""The loop as it runs on an accelerator: facts are read one step late. Here on the CPU, with the lag forced."""

import pytest
import torch
from torch import nn

import dure
from dure.comm.groups import Solo
from dure.data import TensorData
from dure.errors import LossNotFinite
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.precision import Precision
from dure.strategies.contract.step_facts import Requests
from dure.strategies.single import Single
from dure.strategies.table import STRATEGIES
from dure.training.loop import TrainingLoop
from dure.training.session.loader import Loader, SampleFetch
from dure.training.session.sample_order import SampleOrder
from tests.specs import spec_of

CPU = torch.device("cpu")


class Line(dure.Task):
    counted: bool = False
    poison: int = -1

    def build_model(self):
        torch.manual_seed(0)
        return nn.Linear(3, 1).double()

    def train_data(self):
        inputs = torch.arange(30, dtype=torch.float64).view(10, 3) / 30
        if self.poison >= 0:
            inputs[self.poison] = torch.nan
        return TensorData(inputs)

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        errors = model(batch[0]).square().squeeze(1)
        return dure.Sum(errors.sum(), 100 * len(errors)) if self.counted else errors.mean()


def loop_of(task, lag, requested=Requests, **settings):
    strategy = Single(
        StrategyContext(STRATEGIES["single"], Solo(), (CPU,), Precision("fp32", "cpu"), spec_of("single"))
    )
    strategy.prepare(task.build_model(), task.build_optimizer, task.loss)
    loader = Loader(SampleFetch(task.train_data(), task.collate, 0), CPU, 0)
    arguments = {"microbatch_size": None, "schedule": None, "requested": requested, "record_samples": True, **settings}
    loop = TrainingLoop(strategy, loader, SampleOrder(10, 4, seed=1), **arguments)
    loop.lag = lag
    return loop


def train(loop, total_samples=50):
    outcomes = [outcome for boundary in loop.boundaries(0, total_samples, 0) for outcome in boundary.outcomes]
    return [outcome.record for outcome in outcomes + loop.drain()]


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_a_lagging_loop_trains_and_records_what_one_without_lag_does(counted, microbatch_size):
    loops = [loop_of(Line(counted=counted), lag, microbatch_size=microbatch_size) for lag in (0, 1)]
    records = [train(loop) for loop in loops]
    facts = [[(r.step, r.epoch, r.samples_seen, r.loss_sum, r.loss_count, r.samples) for r in run] for run in records]
    assert facts[0] == facts[1]
    assert len(facts[1]) == 15
    weights = [loop.strategy.model.state_dict() for loop in loops]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_lagging_loop_knows_a_step_one_boundary_later():
    boundaries = list(loop_of(Line(), lag=1).boundaries(0, 12, 0))
    assert [[outcome.record.step for outcome in b.outcomes] for b in boundaries] == [[], [1], [2], [3]]


def test_a_wish_to_stop_reaches_the_caller_one_boundary_later():
    wishes = iter([Requests(), Requests(stop=True), Requests(stop=True), Requests(stop=True)])
    boundaries = loop_of(Line(), lag=1, requested=lambda: next(wishes)).boundaries(0, 12, 0)
    assert [[outcome.requests.stop for outcome in b.outcomes] for b in boundaries] == [[], [False], [True], [True]]


def test_a_loss_that_is_no_number_is_named_with_its_own_step_when_read_late():
    clean = train(loop_of(Line(), lag=0), 10)
    poison = clean[1].samples[0]
    with pytest.raises(LossNotFinite, match=r"at step 2 .*rank 0, samples \["):
        train(loop_of(Line(poison=poison), lag=1))


def test_waiting_for_data_is_no_longer_than_the_device_was_idle():
    records = train(loop_of(Line(), lag=1))
    assert all(0 <= r.data_seconds <= r.wall_seconds for r in records)


def test_wall_times_add_up_whatever_the_lag():
    for record in train(loop_of(Line(), lag=1)):
        parts = record.forward_backward_seconds + record.sync_seconds + record.optimizer_seconds
        assert parts + record.data_seconds <= record.wall_seconds + 1e-9
