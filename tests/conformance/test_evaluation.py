"""Evaluation is exact: the same count and the same numbers on any number of ranks."""

import errno
import functools
import shutil

import pytest

import dure
from dure.errors import RunInvalid, WorkerFailed
from examples.digits import Digits
from tests.conformance.cases import MANY, is_layered, train_case
from tests.conformance.tasks import Regression
from tests.conformance.zoo.feature import STEPS, ZooTask, chain

EXACT = 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "batch"),
    [(Regression(kind="tokens"), 7), (Regression(dtype="float32"), None), (Digits(width=8), 7)],
    ids=repr,
)
def test_evaluation_over_1_to_4_ranks_is_identical(task, batch, tmp_path):
    run = train_case(tmp_path, task, samples=64)
    # more threads on fewer ranks, as by default
    threads = {1: 4, 2: 2, 3: 1, 4: 1}
    alone, *others = [
        dure.evaluate(run, nproc=n, threads=threads[n], eval_batch_size=batch, start="fork") for n in threads
    ]
    assert alone["metrics"].keys() > {"loss"}
    for name, metric in alone["metrics"].items():
        for other in others:
            assert other["metrics"][name]["count"] == metric["count"]
            assert other["metrics"][name]["value"] == pytest.approx(metric["value"], abs=EXACT, rel=EXACT)


def test_evaluation_counts_every_sample_once_however_uneven(tmp_path):
    run = train_case(tmp_path, Digits(width=8), samples=64)
    for nproc in (1, 3):
        metrics = dure.evaluate(run, nproc=nproc, eval_batch_size=100, start="fork")["metrics"]
        assert {name: metric["count"] for name, metric in metrics.items()} == {"loss": 355, "accuracy": 355}


def test_evaluation_with_more_ranks_than_batches_is_the_same(tmp_path):
    run = train_case(tmp_path, Regression(), samples=20)
    one = dure.evaluate(run, nproc=1, eval_batch_size=23, start="fork")["metrics"]
    assert dure.evaluate(run, nproc=3, eval_batch_size=23, start="fork")["metrics"] == one


def test_evaluation_of_a_run_without_a_checkpoint_is_refused_and_leaves_nothing(tmp_path):
    run = train_case(tmp_path, Regression(), samples=20)
    shutil.rmtree(run / "checkpoints")
    before = sorted(run.rglob("*"))
    with pytest.raises(RunInvalid, match=f"has no checkpoint yet: train it further with .*train.resume='{run}'"):
        dure.evaluate(run, start="fork")
    assert sorted(run.rglob("*")) == before


def test_evaluation_of_a_run_that_cannot_be_written_is_refused_before_it_begins(tmp_path, monkeypatch):
    run = train_case(tmp_path, Regression(), samples=20)
    before = sorted(run.rglob("*"))

    def touch(path):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("dure.api.train.touch", touch)
    with pytest.raises(RunInvalid, match=f"{run} cannot be written: Read-only file system"):
        dure.evaluate(run, start="fork")
    assert sorted(run.rglob("*")) == before


def evaluated(folder, layered, strategy, num_devices):
    """Return the summary of a run that is evaluated after each epoch."""
    return dure.train(
        Regression(kind="tokens", layered=layered), strategy=strategy, nproc=num_devices, runs_dir=folder, quiet=True,
        start="fork", epochs=2, global_batch_size=7,
    )  # fmt: skip


@pytest.fixture(scope="module")
def evaluated_alone(tmp_path_factory):
    return functools.cache(lambda layered: evaluated(tmp_path_factory.mktemp("one"), layered, "single", 1))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "num_devices"), MANY)
def test_evaluation_during_training_equals_one_process(strategy, num_devices, evaluated_alone, tmp_path):
    layered = is_layered(strategy)
    one, many = evaluated_alone(layered), evaluated(tmp_path, layered, strategy, num_devices)
    assert [row.samples_seen for row in many.rows] == [44, 88]
    for ours, theirs in zip(many.rows, one.rows, strict=True):
        assert ours.train_loss == pytest.approx(theirs.train_loss, rel=1e-10)
        for name, metric in theirs.metrics.items():
            assert ours.metrics[name].count == metric.count
            assert ours.metrics[name].value == pytest.approx(metric.value, rel=1e-10)


class HookedMetrics(ZooTask):
    """Has metrics of what a hook on a block has seen, which the last of two ranks computes."""

    def build_model(self):
        self.seen, model = {}, chain()
        model[5].register_forward_hook(lambda module, args, output: self.seen.update(last=output))
        return model

    def metrics(self, model, batch):
        model(batch[0])
        return {"size": dure.Sum(self.seen["last"].square().sum(), len(batch[0]))}


class CopiedInMetrics(ZooTask):
    """Has metrics of a copy of the model."""

    def metrics(self, model, batch):
        copied = chain()
        copied.load_state_dict(model.state_dict())
        return {"size": dure.Sum(copied(batch[0]).square().sum(), len(batch[0]))}


@pytest.mark.parametrize(
    ("task", "strategy", "said"),
    [
        (HookedMetrics, "rpc_model", "KeyError: 'last'"),
        (CopiedInMetrics, "rpc_model", "Missing key"),
        (CopiedInMetrics, "fsdp", "While copying"),
    ],
)
def test_metrics_when_they_fail_with_a_divided_model_then_the_run_is_refused(task, strategy, said, tmp_path):
    with pytest.raises(WorkerFailed, match=f"failed in an evaluation .*{said}") as caught:
        train_case(tmp_path, task(), strategy, 2, **STEPS)
    assert caught.value.exit_code == 2
