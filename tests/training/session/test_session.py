"""Every wrong return of a task is one sentence with the cure and exit code 2, and leaves no run behind."""

import random
import re
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import dure
from dure.comm import startup
from dure.data import TensorData
from dure.errors import SpecInvalid, WorkerFailed
from dure.host import devices as machine
from tests.commands import RunFiles

ROWS = TensorData(torch.arange(12.0).view(6, 2), torch.zeros(6))


class Small(dure.Task):
    """Trains in a few microseconds."""

    def build_model(self):
        return nn.Linear(2, 1)

    def train_data(self):
        return ROWS

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.001)

    def loss(self, model, batch):
        return model(batch[0]).square().mean()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def train(task, folder, **settings):
    """Train in this process."""
    settings = {"start": "inline", "threads": 1, "device": "cpu", "quiet": True, "global_batch_size": 2} | settings
    return dure.train(task, runs_dir=folder, **settings)


def constant(value):
    return lambda self, *arguments: value


def sums(**sums_):
    return lambda self, model, batch: sums_


WRONG = {
    "model": (
        {"build_model": constant(torch.ones(2))},
        "T.build_model returned Tensor: return a torch.nn.Module",
    ),
    "model without return": (
        {"build_model": constant(None)},
        "T.build_model returned NoneType: return a torch.nn.Module",
    ),
    "frozen model": (
        {"build_model": lambda self: nn.Linear(2, 1).requires_grad_(False)},
        "T.build_model returned a model without trainable parameters: leave some with requires_grad=True",
    ),
    "model in DataParallel": (
        {"build_model": lambda self: nn.Sequential(nn.DataParallel(nn.Linear(2, 1)))},
        r"a model that is divided over ranks or devices already \(0 is wrapped in DataParallel\): return the plain",
    ),
    "optimizer": (
        {"build_optimizer": constant([0.1])},
        r"T.build_optimizer returned list: return a torch\.optim\.Optimizer",
    ),
    "train data": ({"train_data": constant(None)}, "T.train_data returned NoneType: give a map-style dataset"),
    "empty train data": ({"train_data": constant([])}, r"T.train_data returned an empty dataset \(list\)"),
    "stream": ({"train_data": constant(Stream())}, "T.train_data returned Stream, an IterableDataset: a stream has"),
    "empty eval data": ({"eval_data": constant([])}, r"T.eval_data returned an empty dataset \(list\)"),
    "eval stream": ({"eval_data": constant(Stream())}, "T.eval_data returned Stream, an IterableDataset"),
    "schedule of steps": (
        {"build_schedule": lambda self, optimizer, n: torch.optim.lr_scheduler.StepLR(optimizer, 2)},
        "build_schedule gave StepLR: return a function from samples seen to the factor on the learning rate, such as",
    ),
    "schedule without return": (
        {"build_schedule": constant(lambda seen: None)},
        "what build_schedule returned gave NoneType: return a function from samples seen",
    ),
    "schedule number": ({"build_schedule": constant(0.5)}, "build_schedule gave float: return a function"),
    "loss": ({"loss": constant(None)}, "the task's loss returned None: return a scalar tensor"),
    "loss per sample": (
        {"loss": lambda self, model, batch: model(batch[0])[:, 0]},
        r"the task's loss returned a tensor of shape \(2,\): return a scalar tensor",
    ),
    "collate": (
        {"collate": constant(None), "train_data": constant([1.0, 2.0])},
        "a training batch is None: the task's collate",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_return_is_refused_before_the_first_step_and_leaves_no_run(case, tmp_path):
    methods, said = WRONG[case]
    with pytest.raises(WorkerFailed, match=said) as caught:
        train(type("T", (Small,), methods), tmp_path)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_schedule_without_return_at_later_samples_is_one_sentence(tmp_path):
    task = type("T", (Small,), {"build_schedule": constant(lambda seen: 1.0 if seen < 2 else None)})
    with pytest.raises(WorkerFailed, match="schedule gave NoneType at 2 samples seen: return a number at") as caught:
        train(task, tmp_path)
    assert caught.value.exit_code == 2


class Widened(Small):
    """Adds a number to the dictionaries that its data hold, when a batch is made of them."""

    def train_data(self):
        return [{"x": torch.ones(2) * index} for index in range(6)]

    def collate(self, samples):
        for sample in samples:
            sample["sum"] = float(sample["x"].sum())
        return (torch.stack([sample["x"] for sample in samples]),)


def test_samples_to_which_collate_adds_are_those_of_the_other_ranks(tmp_path):
    train(Widened, tmp_path, strategy="ddp", nproc=2, start="fork", epochs=1)


WRONG_IN_EVALUATION = {
    "metrics": ({"metrics": constant(0.5)}, r"metrics returned 0\.5: return a dict of dure\.Sum\(total, count\)"),
    "metric": (
        {"metrics": sums(accuracy=0.5)},
        r"metrics returned 0\.5 as 'accuracy': return the total over the batch and what it counts, such as dure\.Sum",
    ),
    "metric without count": (
        {"metrics": sums(accuracy=dure.Sum(1.0, 0))},
        "the evaluation metric accuracy has a count of 0 over all samples: nothing to divide by",
    ),
    "metric of many numbers": (
        {"metrics": sums(accuracy=dure.Sum(torch.ones(3), 3))},
        r"holds a tensor of shape \(3,\): give it scalars, one Sum for each number",
    ),
    "loss that returns in training only": (
        {"loss": lambda self, model, batch: model(batch[0]).mean() if model.training else None},
        "loss returned None in an evaluation: return a scalar tensor, with a return statement",
    ),
}


@pytest.mark.parametrize("case", WRONG_IN_EVALUATION)
def test_a_wrong_return_in_an_evaluation_is_one_sentence(case, tmp_path):
    methods, said = WRONG_IN_EVALUATION[case]
    with pytest.raises(WorkerFailed, match=said) as caught:
        train(type("T", (Small,), {"eval_data": constant(ROWS), **methods}), tmp_path)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_best_metric_that_is_not_measured_is_refused_with_those_that_are(tmp_path):
    methods = {"eval_data": constant(ROWS), "metrics": sums(accuracy=dure.Sum(1, 2))}
    with pytest.raises(
        WorkerFailed, match=r"best_metric is acc.* but the evaluation measures loss, accuracy: choose one"
    ):
        train(type("T", (Small,), methods), tmp_path, best_metric="acc")


def test_dropping_the_last_batch_of_too_little_data_is_refused(tmp_path):
    with pytest.raises(
        WorkerFailed, match="drop_last=True with 6 training samples and a global batch of 7 leaves nothing"
    ):
        train(Small, tmp_path, drop_last=True, global_batch_size=7)
    assert list(tmp_path.iterdir()) == []


def test_evaluating_a_run_whose_task_has_no_evaluation_data_is_refused(tmp_path):
    summary = train(Small, tmp_path)
    with pytest.raises(
        WorkerFailed, match=r"Small\.eval_data returned None: there is nothing to evaluate on"
    ) as caught:
        dure.evaluate(summary.run, start="inline")
    assert caught.value.exit_code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nccl_without_a_cuda_device_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(
        SpecInvalid, match=r"backend is nccl, which moves CUDA tensors only, but device is cpu: use gloo"
    ):
        train(Small, tmp_path, backend="nccl", nproc=2, device="auto", start="fork")
    assert list(tmp_path.iterdir()) == []


def test_nccl_with_servers_which_have_no_device_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "count_accelerators", lambda kind: 2)
    with pytest.raises(SpecInvalid, match="backend is nccl, which moves no CPU tensors, but servers are CPU processes"):
        train(Small, tmp_path, strategy="parameter_server", backend="nccl", nproc=1, device="cuda", start="fork")


@pytest.mark.parametrize("strategy", ["ddp", None])
def test_several_processes_inside_this_one_are_refused(strategy, tmp_path):
    with pytest.raises(SpecInvalid, match="start is inline but ddp on 2 needs processes: use fork or spawn"):
        train(Small, tmp_path, strategy=strategy, nproc=2)


def test_a_task_is_built_under_the_runs_seed(tmp_path):
    drawn = []

    class Draws(Small):
        def build_model(self):
            drawn.append((random.random(), np.random.random(), torch.rand(()).item()))
            return super().build_model()

    for seed in (1, 1, 2):
        train(Draws, tmp_path, seed=seed)
    assert drawn[0] == drawn[1]
    assert all(a != b for a, b in zip(drawn[1], drawn[2], strict=True))


def test_a_run_may_be_shorter_than_an_epoch_or_of_a_fraction(tmp_path):
    assert train(Small, tmp_path, samples=1).samples == 1
    half = train(Small, tmp_path, epochs=0.5)
    assert (half.samples, half.epochs, half.steps) == (3, 0.5, 2)


def test_threads_when_they_wait_for_cores_then_the_run_says_so_and_records_it(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("dure.training.trainer.slowdown_of_threads", lambda: 11.0)
    summary = train(Small, tmp_path, quiet=False)
    assert "small operations take 11 times as long as with one, so --threads 1 may be" in capfd.readouterr().err
    assert [event["slowdown"] for event in RunFiles(Path(summary.run)).events("slow_threads")] == [11.0]


def test_the_model_summary_of_a_task_is_shown_once(tmp_path, capfd):
    class Describing(Small):
        def describe(self, model):
            return f"a model of {sum(p.numel() for p in model.parameters())} numbers"

    train(Describing, tmp_path, quiet=False)
    assert len(re.findall("a model of 3 numbers", capfd.readouterr().err)) == 1


def test_loss_when_its_trial_takes_long_then_that_is_said_although_what_a_trial_prints_is_not(
    tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr(startup, "_BEAT_SECONDS", 0.02)
    monkeypatch.setattr(startup, "FIRST_NOTICE_SECONDS", 0.1)

    class Slow(Small):
        def loss(self, model, batch):
            if not (tmp_path / "slept").exists():
                (tmp_path / "slept").touch()
                time.sleep(0.3)
            return super().loss(model, batch)

    train(Slow, tmp_path, quiet=False)
    assert "dure: still trying the task on a few samples, for 0 s now" in capfd.readouterr().err


class PreparesInMemory(Small):
    """Sets what training needs where it should write files."""

    shift = 0.0

    def prepare_data(self):
        self.mean = 1.0
        PreparesInMemory.shift = 1.0


@pytest.mark.parametrize("nproc", [1, 2])
def test_prepare_data_when_it_sets_attributes_that_other_ranks_lack_then_it_is_refused(nproc, tmp_path):
    settings = {"strategy": "ddp" if nproc > 1 else "single", "nproc": nproc, "quiet": True, "start": "fork"}
    said = r"prepare_data sets task\.mean, .*PreparesInMemory\.shift, which the other ranks of this host do not have"
    expected = nullcontext() if nproc == 1 else pytest.raises(WorkerFailed, match=said)
    with expected as refused:
        dure.train(PreparesInMemory(), runs_dir=tmp_path, device="cpu", samples=6, **settings)
    assert nproc == 1 or refused.value.exit_code == 2
