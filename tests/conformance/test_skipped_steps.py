"""A batch whose loss is not finite is skipped on all ranks at once: the weights are those of one process that skips."""

import pytest
import torch

import dure
from dure.errors import SpecInvalid, WorkerFailed
from dure.strategies.table import STRATEGIES
from tests.commands import RunFiles
from tests.conformance.cases import ALWAYS, TO_ROUNDING, is_layered, largest_difference, train_case, weights_of
from tests.conformance.tasks import Normalised, Regression

STEPS = {"samples": 88, "global_batch_size": 7, "seed": 4, "record_samples": True, "on_nonfinite": "skip"}
MANY = [
    pytest.param(name, 3 if info.many_devices else 1, marks=[] if name in ALWAYS else pytest.mark.slow)
    for name, info in STRATEGIES.items()
    if "on_nonfinite" in info.settings
]


class Poisoned(Regression):
    """Has a sample that is not a number, so one batch of each epoch has a loss that is none."""

    poison: int = 5

    def train_data(self):
        data = super().train_data()
        data.tensors[0][self.poison] = float("nan")
        return data


class PoisonedStatistics(Normalised):
    def train_data(self):
        data = super().train_data()
        data.tensors[0][5] = float("nan")
        return data


@pytest.mark.parametrize(("strategy", "nproc"), MANY)
def test_step_when_its_loss_is_not_finite_then_all_ranks_skip_it(strategy, nproc, trained, tmp_path):
    task = Poisoned(layered=is_layered(strategy), optimizer="adamw")
    one = trained(task, **STEPS)
    many = train_case(tmp_path, task, strategy, nproc, **STEPS)
    assert largest_difference(weights_of(one), weights_of(many)) < TO_ROUNDING
    skipped = [[event["step"] for event in RunFiles(run).events("step_skipped")] for run in (one, many)]
    assert skipped[0] == skipped[1]
    assert len(skipped[0]) == 2  # once in each epoch
    records = {record["step"]: record for record in RunFiles(many).records(0)}
    assert [step for step, record in records.items() if record["loss_count"] == 0] == skipped[0]


def test_skipped_step_then_its_culprit_is_named_and_statistics_stay_finite(tmp_path):
    run = train_case(tmp_path, PoisonedStatistics(), "ddp", 2, **STEPS)
    event, *_ = RunFiles(run).events("step_skipped")
    (culprit,) = event["culprits"]
    assert 5 in culprit["samples"]
    assert f"rank {culprit['rank']}, samples" in event["message"]
    assert all(torch.isfinite(tensor).all() for tensor in weights_of(run).values())


class Broken(Regression):
    def loss(self, model, batch):
        return super().loss(model, batch) * (float("nan") if model.training else 1.0)


def test_steps_when_all_are_skipped_then_the_run_ends_and_says_that_every_rank_had_it(tmp_path):
    with pytest.raises(WorkerFailed, match=r"at step 11 .*on every rank: .*the 10 steps before it were skipped too"):
        train_case(tmp_path, Broken(), "ddp", 2, **STEPS)


def test_strategy_when_its_ranks_are_not_in_step_then_skipping_is_refused(tmp_path):
    with pytest.raises(SpecInvalid, match="on_nonfinite"):
        dure.train(Regression(), strategy="averaging", nproc=2, on_nonfinite="skip", runs_dir=tmp_path)
