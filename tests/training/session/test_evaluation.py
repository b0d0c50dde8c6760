"""Exact evaluation: sums and counts over all batches, the model left as it was."""

import math
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dure
from dure.data import TensorData
from dure.errors import DataInvalid, TaskInvalid, WorkerFailed
from dure.training.session.evaluation import evaluate, evaluation_batch_size
from dure.training.session.loader import Loader, SampleFetch
from tests.comm.gloo_ranks import on_ranks
from tests.conformance.cases import train_case
from tests.conformance.tasks import Regression
from tests.strategies.contract.test_base import prepared
from tests.training.session.test_session import Small

CPU = torch.device("cpu")
COLUMN = TensorData(torch.arange(11, dtype=torch.float64)[:, None].expand(11, 2).contiguous())


class Measuring(Small):
    """Measures each row's sum; its loss is three times that."""

    def loss(self, model, batch):
        assert not model.training
        assert not torch.is_grad_enabled()
        return 3 * batch[0].sum(1).mean()

    def metrics(self, model, batch):
        rows = batch[0].sum(1)
        measured = {"row": dure.Sum(rows.sum(), len(rows)), "weighted": dure.Sum(float(rows.sum()), 0.5 * len(rows))}
        # a metric that only some batches have is counted where it is
        return {**measured, "large": dure.Sum(1, 1)} if rows.max() >= 20 else measured


def measured(group=None, *, strategy=None, batch_size=3, task=None, data=COLUMN):
    strategy = strategy or prepared(lambda model, batch: None, group=group)
    loader = Loader(SampleFetch(data, None, 0), CPU, 0)
    return evaluate(task or Measuring(), strategy, loader, num_samples=len(data), batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 11, 100])
def test_evaluation_divides_once_over_all_samples_however_batched(batch_size):
    metrics = measured(batch_size=batch_size)
    assert (metrics["row"].value, metrics["row"].count) == (10.0, 11)
    assert (metrics["loss"].value, metrics["loss"].count) == (30.0, 11)
    assert (metrics["weighted"].value, metrics["weighted"].count) == (20.0, 5.5)
    assert metrics["large"].value == 1.0


def test_evaluation_over_three_ranks_is_the_same_on_each():
    answers = on_ranks(3, lambda group: measured(group, batch_size=2))
    assert answers == [measured(batch_size=2)] * 3


@pytest.mark.parametrize("name", ["dp", "balanced_dp"])
def test_evaluation_over_virtual_devices_uses_all_of_them_up_to_date(name):
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    strategy = prepared(lambda model, batch: None, model=model, name=name, devices=3)
    with torch.no_grad():
        model.weight.fill_(2.0)
    used = set()

    class Predicting(Measuring):
        def metrics(self, model, batch):
            used.add(id(model))
            return {"prediction": dure.Sum(model(batch[0]).sum(), len(batch[0]))}

    metrics = measured(strategy=strategy, batch_size=2, task=Predicting())
    strategy.close()
    assert len(used) == 3
    assert (metrics["prediction"].value, metrics["prediction"].count) == (20.0, 11)


def test_evaluation_over_virtual_devices_leaves_what_a_task_keeps_to_one_batch_at_a_time():
    class Keeping(Measuring):
        def loss(self, model, batch):
            self.kept = batch
            time.sleep(0.01)
            return super().loss(model, batch)

        def metrics(self, model, batch):
            assert self.kept is batch
            return super().metrics(model, batch)

    strategy = prepared(lambda model, batch: None, name="dp", devices=3)
    measured(strategy=strategy, batch_size=2, task=Keeping())
    strategy.close()


@pytest.mark.parametrize("is_training", [True, False])
def test_evaluation_leaves_the_models_mode_as_it_was_even_after_an_error(is_training):
    class Failing(Measuring):
        def metrics(self, model, batch):
            raise KeyError("no such column")

    strategy = prepared(lambda model, batch: None)
    strategy.model.train(is_training)
    measured(strategy=strategy)
    assert strategy.model.training == is_training
    with pytest.raises(KeyError, match="no such column"):
        measured(strategy=strategy, task=Failing())
    assert strategy.model.training == is_training


@pytest.mark.parametrize("name", ["single", "balanced_dp"])
def test_evaluation_whose_metrics_call_backward_leaves_no_gradients(name):
    class Attacking(Measuring):
        def metrics(self, model, batch):
            with torch.enable_grad():
                model(batch[0]).mean().backward()
            (gradient,) = [parameter.grad for parameter in model.parameters()]
            return {"gradient": dure.Sum(gradient.sum() * len(batch[0]), len(batch[0]))}

    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    strategy = prepared(lambda model, batch: None, model=model, name=name, devices=2 if name == "balanced_dp" else 1)
    metrics = measured(strategy=strategy, batch_size=2, task=Attacking())
    assert [p.grad for each in strategy.evaluation_models() for p in each.parameters() if p.grad is not None] == []
    assert metrics["gradient"].value == 10.0
    strategy.close()


def test_evaluation_that_freezes_parameters_is_refused():
    class Freezing(Measuring):
        def metrics(self, model, batch):
            model.requires_grad_(False)
            return super().metrics(model, batch)

    model = nn.Linear(2, 1, dtype=torch.float64)
    model.bias.requires_grad_(False)
    strategy = prepared(lambda model, batch: None, model=model)
    with pytest.raises(TaskInvalid, match="metrics freeze or unfreeze weight in an evaluation"):
        measured(strategy=strategy, task=Freezing())


def test_evaluation_puts_the_default_dtype_back():
    class Double(Measuring):
        def metrics(self, model, batch):
            torch.set_default_dtype(torch.float64)
            return super().metrics(model, batch)

    measured(task=Double())
    assert torch.get_default_dtype() == torch.float32


def test_a_metric_that_counts_nothing_is_refused():
    class Empty(Measuring):
        def metrics(self, model, batch):
            return {"accuracy": dure.Sum(torch.tensor(0.0), torch.tensor(0))}

    with pytest.raises(DataInvalid, match="the evaluation metric accuracy has a count of 0 over all samples"):
        measured(task=Empty())


def test_a_metric_that_is_not_finite_is_said_as_it_is():
    class Overflowing(Measuring):
        def metrics(self, model, batch):
            return {"perplexity": dure.Sum(math.inf, 1)}

    assert measured(task=Overflowing())["perplexity"].value == math.inf


@given(num_samples=st.integers(1, 10**7))
def test_batches_of_an_evaluation_are_even_over_a_few_ranks(num_samples):
    size = evaluation_batch_size(num_samples, None)
    assert 1 <= size <= 256
    assert math.ceil(num_samples / size) >= min(num_samples, 9)
    assert evaluation_batch_size(num_samples, 7) == 7


def test_metric_whose_count_is_of_batches_is_refused_before_training(tmp_path):
    class Miscounted(Regression):
        def metrics(self, model, batch):
            x, y, _ = batch
            return {"acc": dure.Sum((model(x) - y).abs().sum(), 1)}

    with pytest.raises(WorkerFailed, match=r"metric acc counts 1 over 8 samples and 2 over the same") as caught:
        train_case(tmp_path, Miscounted(), global_batch_size=4, samples=8)
    assert caught.value.exit_code == 2
    assert not list(tmp_path.glob("*-single*"))
