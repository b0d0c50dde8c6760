"""Names on a task that dure never calls: misspelt hooks and other frameworks' are refused, helpers are not."""

import functools
import re
from typing import ClassVar

import pytest
import torch
from torch import nn

import dure
from dure.errors import TaskInvalid
from dure.training.task.given_task import giving
from dure.training.task.hooks import HOOKS, check_task_class


class Small(dure.Task):
    def build_model(self):
        return nn.Linear(1, 1)

    def train_data(self):
        return [torch.ones(1)]

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        return model(batch).mean()


def method(self, *arguments):
    return None


def refusal(**names):
    with pytest.raises(TaskInvalid, match="which dure never uses") as caught:
        check_task_class(type("Mine", (Small,), names))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("metric", "metrics(self, model, batch)"),
        ("metricss", "metrics(self, model, batch)"),
        ("validation_step", "metrics(self, model, batch)"),
        ("evaluate", "metrics(self, model, batch)"),
        ("valid_data", "eval_data(self)"),
        ("val_data", "eval_data(self)"),
        ("eval_dataset", "eval_data(self)"),
        ("evaldata", "eval_data(self)"),
        ("collate_fn", "collate(self, samples)"),
        ("build_scheduler", "build_schedule(self, optimizer, total_samples)"),
        ("prepare", "prepare_data(self)"),
        ("Describe", "describe(self, model)"),
    ],
)
def test_method_when_it_is_near_a_hook_or_called_so_elsewhere_then_is_refused_with_what_was_meant(name, meant):
    said = refusal(**{name: method})
    assert said == (
        f"Mine has {name}, which dure never uses: it uses {meant}; rename it, or, if it is a helper of your own, "
        f"begin its name with an underscore: _{name}"
    )


@pytest.mark.parametrize("kind", [staticmethod, classmethod, property, functools.cached_property])
def test_method_when_it_is_of_another_kind_then_is_refused_too(kind):
    assert "Mine has val_data, which dure never uses" in refusal(val_data=kind(method))


def test_hooks_when_another_framework_calls_them_then_are_refused_all_at_once():
    said = refusal(on_train_epoch_end=method, metric=method, default={"epochs": 3})
    for words in ("on_train_epoch_end, which dure never uses: it has no such hook", "metric,", "it uses defaults"):
        assert words in said


@pytest.mark.parametrize(
    ("written", "missing"),
    [
        ("train_dataset", "train_data"),
        ("configure_optimizers", "build_optimizer"),
        ("build_optimiser", "build_optimizer"),
        ("training_step", "loss"),
        ("configure_model", "build_model"),
    ],
)
def test_needed_method_when_it_is_named_otherwise_then_the_refusal_says_so(written, missing):
    methods = {name: value for name, value in vars(Small).items() if name in HOOKS and name != missing}
    with pytest.raises(TaskInvalid, match=rf"Mine lacks {missing}\(.*\): rename {written} to {missing}"):
        check_task_class(type("Mine", (dure.Task,), {**methods, written: method}))


def uses_validation_data(task):
    """Stand for a script's own function that calls a task's helper."""
    return task.validation_data()


class Honest(Small):
    """Has names near the hooks' that are its own affair."""

    metric: str = "accuracy"
    loss_weight: float = 1.0
    val_data: str = "a path"
    shared_metrics: ClassVar = ("a", "b")
    default_rate = 0.1

    def evaluate_batch(self, batch):
        return batch

    def data_path(self):
        return "x"

    def _collate_fn(self, samples):
        return samples

    def collate_fn(self, samples):
        return samples

    def collate(self, samples):
        return self.collate_fn(samples)

    def build_schedules(self):
        return {}

    def build_schedule(self, optimizer, total_samples):
        return None

    def eval_step(self, model, batch):
        return getattr(self, "compute_metrics")(model, batch)  # noqa: B009

    def compute_metrics(self, model, batch):
        return {}

    def metrics(self, model, batch):
        return self.eval_step(model, batch)

    def validation_data(self):
        return None

    def train_data_path(self):
        return None


def test_names_when_the_task_uses_them_itself_or_has_the_hook_then_are_taken():
    check_task_class(Honest)


def test_name_when_it_is_set_on_the_object_then_is_looked_at_too():
    task = Small()
    setattr(task, "metric", lambda model, batch: {})  # noqa: B010
    with pytest.raises(TaskInvalid, match="Small has metric, which dure never uses"), giving(task):
        pass


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "= None"), (3, "= 3"), (property(method), "as a property")],
    ids=["None", "3", "property"],
)
def test_hook_when_it_is_no_method_then_is_refused_in_one_sentence(value, shown):
    said = f"Mine has metrics {shown}, but dure calls metrics(self, model, batch): give it these parameters"
    with pytest.raises(TaskInvalid, match=re.escape(said)):
        check_task_class(type("Mine", (Small,), {"metrics": value}))
