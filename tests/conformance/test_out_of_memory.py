"""Memory runs out on one rank: all repeat the step with smaller microbatches, and the weights are the undisturbed's."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import dure
from dure.errors import WorkerFailed
from dure.strategies.table import STRATEGIES
from tests.commands import RunFiles
from tests.conformance.cases import (
    TO_ROUNDING,
    is_layered,
    largest_difference,
    samples_by_epoch,
    train_case,
    weights_of,
)
from tests.conformance.tasks import Normalised, Regression

STEPS = {"global_batch_size": 22, "samples": 88, "seed": 5, "record_samples": True, "snapshot_every": 1}
RESTARTS = {"max_restarts": 3}
FIRST_RANK_COMPUTES = ("rpc_model",)
"""Strategies in which only the first rank has samples."""
PLACES = [
    pytest.param(name, 3 if info.many_devices else 1, marks=[] if name in ("ddp", "single") else pytest.mark.slow)
    for name, info in STRATEGIES.items()
    if info.is_exact
]


class Hungry(Regression):
    """Has memory for so many samples at once."""

    most: int = 3
    since: int = 1
    """The first call of the loss in training, in each process, that it matters in."""

    def loss(self, model, batch):
        if getattr(self, "process", None) != os.getpid():  # restarts and resumes bring a task's counter back
            self.process, self.calls = os.getpid(), 0
        self.calls += torch.is_grad_enabled()
        if torch.is_grad_enabled() and self.calls >= self.since and len(batch[0]) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().loss(model, batch)


def planned(folder: Path, rank: int, step: int) -> Path:
    file = folder / "faults.toml"
    file.write_text(f'[[fault]]\nrank = {rank}\nstep = {step}\nkind = "oom"\n')
    return file


def halvings(run: Path) -> list[tuple[int, int, int, int]]:
    events = RunFiles(run).events("microbatch_halved")
    return [(event["rank"], event["step"], event["from"], event["to"]) for event in events]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "nproc"), PLACES)
def test_step_when_memory_runs_out_on_a_rank_then_all_repeat_it_and_weights_are_the_same(
    strategy, nproc, trained, tmp_path
):
    info = STRATEGIES[strategy]
    rank = 0 if info.one_process or strategy in FIRST_RANK_COMPUTES else nproc - 1
    task = Regression(kind="tokens", optimizer="adamw", layered=is_layered(strategy))
    one = trained(task, **STEPS)
    faults = planned(tmp_path, rank, 3)
    run = train_case(tmp_path, task, strategy, nproc, faults=faults, **RESTARTS, **STEPS)
    ((failed, step, before, after),) = halvings(run)
    assert (failed, step, after) == (rank, 3, -(-before // 2))
    assert largest_difference(weights_of(one), weights_of(run)) < TO_ROUNDING
    assert list(samples_by_epoch(run)) == [list(range(44))] * 2
    assert not RunFiles(run).events("restart")


@pytest.mark.parametrize(("strategy", "nproc", "sizes"), [("single", 1, [22, 11, 6, 3]), ("ddp", 2, [11, 6, 3])])
def test_memory_when_it_runs_out_again_then_microbatches_are_halved_until_they_fit(
    strategy, nproc, sizes, trained, tmp_path
):
    one = trained(Regression(), **STEPS)
    run = train_case(tmp_path, Hungry(most=3), strategy, nproc, **(RESTARTS | {"max_restarts": 1}), **STEPS)
    assert [(before, after) for _, _, before, after in halvings(run)] == list(pairwise(sizes))
    assert largest_difference(weights_of(one), weights_of(run)) < TO_ROUNDING
    summary = RunFiles(run).summary()
    assert (summary["restarts"], summary["microbatch_size"]) == (0, 3)


@pytest.mark.slow
def test_memory_when_not_one_sample_fits_then_the_run_ends_with_the_cure(tmp_path):
    with pytest.raises(WorkerFailed, match="one sample at a time is too much for this device: use precision=") as info:
        train_case(tmp_path, Hungry(most=0, since=2), "ddp", 2, **RESTARTS, **STEPS)
    assert info.value.exit_code == 1
    (run,) = tmp_path.iterdir()
    assert [after for *_, after in halvings(run)] == [6, 3, 2, 1]


def test_memory_when_nothing_may_be_restarted_then_the_cure_names_the_size(tmp_path):
    with pytest.raises(WorkerFailed, match=r"OutOfMemoryError: .*: use microbatch_size=6 \(the result stays the sa"):
        train_case(tmp_path, Hungry(), "ddp", 2, **STEPS)


@pytest.mark.slow
def test_memory_when_a_given_microbatch_is_too_large_then_it_is_halved_from_there(tmp_path):
    run = train_case(tmp_path, Hungry(most=2), "ddp", 2, microbatch_size=4, **RESTARTS, **STEPS)
    # 11 samples by at most 4 are three microbatches, the largest of 4
    assert [(before, after) for _, _, before, after in halvings(run)] == [(4, 2)]


@pytest.mark.slow
def test_run_when_resumed_then_it_begins_with_the_microbatch_that_was_asked_for(tmp_path):
    run = train_case(tmp_path, Hungry(most=6), "ddp", 2, **RESTARTS, **STEPS)
    dure.train(resume=run, samples=132, quiet=True)
    assert [(step, before, after) for _, step, before, after in halvings(run)] == [(1, 11, 6), (5, 11, 6)]


@pytest.mark.slow
def test_strategy_when_its_ranks_are_not_in_step_then_it_goes_on_from_its_checkpoint(tmp_path):
    steps = {**STEPS, "checkpoint": {"every_samples": 22}}
    run = train_case(tmp_path, Hungry(most=6, since=3), "averaging", 2, **RESTARTS, **steps)
    assert [(before, after) for _, _, before, after in halvings(run)] == [(11, 6)]
    assert list(samples_by_epoch(run)) == [list(range(44))] * 2


def test_batchnorm_and_dropout_when_microbatches_became_smaller_then_the_record_says_so(tmp_path):
    faults = planned(tmp_path, 0, 2)
    task = Normalised()
    run = train_case(tmp_path, task, faults=faults, **RESTARTS, **STEPS)
    said = RunFiles(run).summary()["not_preserved"]
    assert said == [
        "BatchNorm: statistics of each microbatch's own samples",
        "microbatches: of at most 11 samples, made smaller when memory ran out",
    ]
