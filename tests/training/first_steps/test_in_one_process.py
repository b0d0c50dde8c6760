"""Comparison of a run's first steps with those of one process: it finds what no inspection knows, and nothing else."""

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dure.records.events import FirstStepsCompared, NotPreserved
from dure.records.run_dir import RunDir
from dure.strategies.contract.strategy import Strategy
from dure.training.first_steps import in_one_process
from dure.training.session.sample_order import SampleOrder
from tests.conformance.cases import TO_ROUNDING, largest_difference, train_case, weights_of
from tests.conformance.tasks import Regression
from tests.conformance.zoo.feature import ZooTask

STRATEGIES = ("ddp", "zero1", "fsdp", "tensor_parallel", "pipeline", "rpc_model", "dp", "model_parallel")
STEPS = {"samples": 28, "global_batch_size": 7}


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare however busy the machine is."""
    monkeypatch.setattr(in_one_process, "_MOST_SECONDS", 600.0)


def events_of(run: Any, kind: type) -> list[Any]:
    return [event for event in RunDir.open(run).events() if isinstance(event, kind)]


def task_for(strategy: str, optimizer: str = "adamw") -> Regression:
    return Regression(optimizer=optimizer, layered=strategy in ("pipeline", "rpc_model", "model_parallel"))


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "rpc_model"])
def test_strategy_that_scales_a_gradient_then_the_record_says_what_differs(strategy, tmp_path, monkeypatch):
    """AdamW hides the scale of gradients in the weights, and its state does not."""
    step = Strategy.optimizer_step

    def scaled_step(self: Strategy) -> None:
        for parameter in self.model.parameters():
            if self.info.name != "single" and parameter.grad is not None:
                parameter.grad.mul_(2)
        step(self)

    monkeypatch.setattr(Strategy, "optimizer_step", scaled_step)
    run = train_case(tmp_path, task_for(strategy), strategy, 2, **STEPS)
    texts = [text for event in events_of(run, NotPreserved) for text in event.texts]
    assert [text for text in texts if "differ from those of one process" in text], texts
    assert not events_of(run, FirstStepsCompared)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy_as_it_is_then_all_weights_and_optimizer_states_agree(strategy, tmp_path):
    run = train_case(tmp_path, task_for(strategy), strategy, 2, **STEPS)
    (found,) = events_of(run, FirstStepsCompared)
    trained = [p for p in task_for(strategy).build_model().parameters() if p.requires_grad]
    frozen_or_tied = 0 if task_for(strategy).layered else 3
    assert (found.steps, found.tensors) == (2, 4 * len(trained) + frozen_or_tied)
    assert not events_of(run, NotPreserved)


def test_microbatches_in_one_process_then_they_are_compared(tmp_path):
    run = train_case(tmp_path, task_for("single", "sgd"), "single", 1, microbatch_size=2, **STEPS)
    assert events_of(run, FirstStepsCompared)
    assert not events_of(train_case(tmp_path, task_for("single"), **STEPS), FirstStepsCompared)


def test_float32_then_rounding_is_no_difference(tmp_path):
    run = train_case(tmp_path, Regression(optimizer="adamw", dtype="float32"), "ddp", 2, **STEPS)
    assert events_of(run, FirstStepsCompared)


class ByNumpy(torch.optim.SGD):
    """Plain gradient descent in NumPy on the parameters' memory, of which torch sees nothing, as of C++ and Triton."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.numpy()[:] -= group["lr"] * parameter.grad.numpy()


class SteppedByNumpy(ZooTask):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return ByNumpy(model.parameters(), lr=0.1)


def test_optimizer_that_writes_to_memory_itself_then_the_trial_is_undone(tmp_path, monkeypatch):
    monkeypatch.setattr("dure.strategies.state.trial._MOST_COPIED_BYTES", 0)  # as with a large model
    one = train_case(tmp_path, SteppedByNumpy(), **STEPS)
    run = train_case(tmp_path, SteppedByNumpy(), "ddp", 2, **STEPS)
    assert largest_difference(weights_of(run), weights_of(one)) < TO_ROUNDING
    assert events_of(run, FirstStepsCompared)


COUNT = itertools.count(1)


class Warmup(torch.optim.SGD):
    """Descent that is slower in its first steps, by numbers that it keeps outside itself."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        Warmup.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.01 * self.number()
        super().step()

    def number(self) -> int:
        return Warmup.steps


class Counted(Warmup):
    def number(self) -> int:
        return next(COUNT)


class SteppedByClosure(ZooTask):
    """Task whose optimiser is known by a closure alone."""

    def __init__(self, optimizer: type) -> None:
        self.make = lambda model: optimizer(model.parameters(), lr=0.1)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.make(model)


@pytest.mark.parametrize(("optimizer", "num_compared"), [(Warmup, 1), (Counted, 0)])
def test_optimizer_that_keeps_state_outside_itself_then_the_trial_is_undone(optimizer, num_compared, tmp_path):
    one = train_case(tmp_path, SteppedByClosure(optimizer), **STEPS)
    run = train_case(tmp_path, SteppedByClosure(optimizer), "dp", 2, **STEPS)
    assert largest_difference(weights_of(run), weights_of(one)) < TO_ROUNDING
    assert len(events_of(run, FirstStepsCompared)) == num_compared


class Attends(ZooTask):
    """Attention, whose keys have a bias with a gradient that is zero up to rounding."""

    def build_model(self) -> nn.Module:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
                self.head = nn.Linear(6, 3)

            def forward(self, x: Any) -> Any:
                x = x[:, None, :] * torch.arange(1, 4, dtype=x.dtype)[None, :, None]
                return self.head(self.attention(x, x, x)[0].mean(1))

        return Model().double()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize(("strategy", "size"), [("tensor_parallel", 1), ("ddp", 2)])
def test_gradient_that_is_rounding_then_it_is_no_difference_in_small_batches_too(strategy, size, tmp_path):
    run = train_case(tmp_path, Attends(), strategy, 2, samples=4, global_batch_size=size)
    assert events_of(run, FirstStepsCompared)


class Anneals(ZooTask):
    """Anneals the weight of a term from another value than that of the class."""

    weight = 1.0

    def build_schedule(self, optimizer: Any, total_samples: int) -> Any:
        def schedule(samples_seen: int) -> float:
            self.weight = 2.0 * 0.97**samples_seen
            return 1.0

        return schedule

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) + self.weight * model(batch[0]).square().mean()


def test_schedule_that_sets_state_then_the_first_step_has_that_of_before(tmp_path):
    assert events_of(train_case(tmp_path, Anneals(), "ddp", 2, **STEPS), FirstStepsCompared)


def test_run_shorter_than_the_steps_then_its_only_step_is_compared(tmp_path):
    run = train_case(tmp_path, task_for("ddp"), "ddp", 2, samples=7, global_batch_size=7)
    assert [event.steps for event in events_of(run, FirstStepsCompared)] == [1]


def test_steps_that_would_take_long_then_none_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(in_one_process, "_MOST_SECONDS", 0.0)
    assert not events_of(train_case(tmp_path, task_for("ddp"), "ddp", 2, **STEPS), FirstStepsCompared)


class SlowOptimizer(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        time.sleep(0.2)
        super().step()


class StepsSlowly(ZooTask):
    """Has a slow optimiser, which an estimate from a call of the loss does not show."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return SlowOptimizer(model.parameters(), lr=1e-2)


def test_steps_that_take_longer_than_estimated_then_they_are_not_all_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(in_one_process, "_MOST_SECONDS", 0.3)
    monkeypatch.setattr(in_one_process._Steps, "seconds_of_sample", lambda self: 0.0)
    assert not events_of(train_case(tmp_path, StepsSlowly(), "ddp", 2, **STEPS), FirstStepsCompared)


@pytest.mark.parametrize(("seconds", "epochs", "expected"), [(0.01, 1, 1.5), (0.1, 250, 5.5), (10.0, 250, 30.0)])
def test_steps_of_a_long_training_then_they_may_take_longer(seconds, epochs, expected, monkeypatch):
    monkeypatch.setattr(in_one_process, "_MOST_SECONDS", 1.5)
    spec = SimpleNamespace(epochs=epochs, samples=None)
    strategy = SimpleNamespace(group=SimpleNamespace(world_size=2), devices=[0], spec=spec)
    order = SampleOrder(44, 11, seed=0)
    assert in_one_process._most_seconds(strategy, order, seconds) == pytest.approx(expected)


def test_model_that_takes_much_memory_then_none_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(in_one_process, "available_memory_bytes", lambda: 1024)
    assert not events_of(train_case(tmp_path, task_for("ddp"), "ddp", 2, **STEPS), FirstStepsCompared)


def test_random_numbers_then_nothing_is_compared(tmp_path):
    run = train_case(tmp_path, Regression(dropout=0.5), "ddp", 2, **STEPS)
    assert not events_of(run, FirstStepsCompared)
