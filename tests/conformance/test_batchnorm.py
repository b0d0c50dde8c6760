"""Synchronised BatchNorm over ranks of unequal shares is BatchNorm over the global batch."""

import functools
import json

import pytest
from torch import nn

import dure
from dure.errors import WorkerFailed
from dure.strategies.table import STRATEGIES
from tests.conformance.cases import TELLING_PAIRS, TO_ROUNDING, crossed, largest_difference, train_case, weights_of
from tests.conformance.tasks import Normalised

SYNCHRONISING = [pair for pair in TELLING_PAIRS if "sync_batchnorm" in STRATEGIES[pair[0]].settings]

# 45 samples by 7: the short last batch has three, one for each of three ranks
STEPS = {"global_batch_size": 7, "epochs": 2, "seed": 4}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    @functools.cache
    def weights(kind: str, momentum: float | None):
        task = Normalised(kind=kind, num_samples=45, momentum=momentum)
        return weights_of(train_case(tmp_path_factory.mktemp("one"), task, **STEPS))

    return weights


@pytest.mark.parametrize(
    ("strategy", "nproc", "kind", "momentum"),
    [*crossed(SYNCHRONISING, [("mean", 0.1), ("tokens", None)]), ("ddp", 1, "mean", 0.1)],
)
def test_sync_batchnorm_over_ranks_equals_one_process(strategy, nproc, kind, momentum, one_process, tmp_path):
    task, one = Normalised(kind=kind, num_samples=45, momentum=momentum), one_process(kind, momentum)
    many = weights_of(train_case(tmp_path, task, strategy, nproc, sync_batchnorm=True, **STEPS))
    assert any(name.endswith("running_var") for name in many)
    assert largest_difference(many, one) < TO_ROUNDING


def test_sync_batchnorm_without_running_statistics_equals_one_process_in_training_and_evaluation(tmp_path):
    task = Normalised(num_samples=45, track=False)
    one = train_case(tmp_path, task, **STEPS)
    many = train_case(tmp_path, task, "ddp", 2, sync_batchnorm=True, **STEPS)
    assert largest_difference(weights_of(many), weights_of(one)) < TO_ROUNDING


class Thawing(Normalised):
    """The same with statistics that are fixed for some calls."""

    def build_model(self):
        self.calls = 0
        return super().build_model()

    def loss(self, model, batch):
        if model.training:
            self.calls += 1
            for module in model.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.train(self.calls > 14)  # more than are tried before training
        return super().loss(model, batch)


@pytest.mark.parametrize(("epochs", "said"), [(1, []), (3, ["BatchNorm without --sync-batchnorm"])])
def test_batchnorm_is_declared_once_its_statistics_move(epochs, said, tmp_path):
    run = train_case(tmp_path, Thawing(num_samples=45), "ddp", 2, **{**STEPS, "epochs": epochs})
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert [text.partition(":")[0] for text in declared if text.startswith("BatchNorm")] == said


@pytest.mark.slow
def test_batchnorm_without_sync_differs_and_says_so(tmp_path):
    task = Normalised(num_samples=45)
    one = weights_of(train_case(tmp_path, task, **STEPS))
    summary = dure.train(task, strategy="ddp", nproc=2, runs_dir=tmp_path, start="fork", quiet=True, **STEPS)
    dure.export(summary.run, tmp_path / "weights.safetensors")
    assert any("BatchNorm" in text for text in summary.not_preserved)
    synchronised = dure.train(
        task, strategy="ddp", nproc=2, runs_dir=tmp_path, start="fork", quiet=True, sync_batchnorm=True, **STEPS
    )
    assert not any("BatchNorm" in text for text in synchronised.not_preserved)
    assert largest_difference(weights_of(train_case(tmp_path, task, "ddp", 2, **STEPS)), one) > 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        {"num_samples": 44, "epochs": 2},  # the last batch of an epoch has two samples
        {"num_samples": 45, "samples": 7 + 1},  # the last batch of the run has one
        {"num_samples": 45, "epochs": 1, "microbatch_size": 2},  # shares of 3, 2, 2 in two microbatches each
        {"num_samples": 45, "epochs": 1, "microbatch_size": 1},  # 1 1 1, 1 1 0, 1 1 0
    ],
    ids=["epoch", "run", "microbatches of all", "a microbatch of none"],
)
def test_sync_batchnorm_is_refused_exactly_where_a_rank_would_be_without_samples(settings, tmp_path):
    settings = dict(settings)
    task = Normalised(num_samples=settings.pop("num_samples"))
    run = {"strategy": "ddp", "nproc": 3, "global_batch_size": 7, "sync_batchnorm": True, **settings}
    if settings.get("microbatch_size") == 2:
        assert train_case(tmp_path, task, **run).is_dir()
        return
    with pytest.raises(WorkerFailed, match=r"sample\(s\) for 3 ranks.*sync_batchnorm=True needs one on each"):
        train_case(tmp_path, task, **run)
