"""A rank is killed or fails, and the run goes on from the step before: the same samples and weights, bit by bit."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

import dure
from dure.errors import WorkerFailed
from dure.strategies.table import STRATEGIES
from dure.training.session.sample_order import SampleOrder
from tests.commands import Prewarmed, RunFiles, wait_until
from tests.conformance.cases import LAYERED, TO_ROUNDING, largest_difference, records_of, weights_of
from tests.conformance.tasks import Regression
from tests.faulty_task import Faulty, fail, is_tried

SAMPLES, BATCH = 110, 7
ADD_AS_THEY_COME = ("dp", "balanced_dp")
"""Strategies whose threads add gradients up in the order in which they are ready: two runs may differ by rounding."""
FIRST_RANK_COMPUTES = ("model_parallel", "rpc_model")
"""Strategies in which only the first rank calls the loss."""


class Mortal(Regression):
    """Goes wrong at a microstep of a rank's process."""

    fault: str = "kill"
    place: tuple[int, int] = (0, 0)
    """Rank and microstep, from 1; 0 for never."""
    flag: str = ""
    """A file that is written when it goes wrong; while it is there, nothing does."""

    def loss(self, model, batch):
        rank, step = self.place
        if torch.is_grad_enabled() and not is_tried() and int(os.environ.get("RANK", "0")) == rank:
            self.done = getattr(self, "done", 0) + 1
            if self.done == step and not (self.flag and Path(self.flag).exists()):
                if self.flag:
                    Path(self.flag).write_text(str(time.time()))
                fail(self.fault)
        return super().loss(model, batch)


class MortalProcess(Mortal):
    """Counts the microsteps of its process, which no restart brings back: the state of a task it would."""

    @property
    def done(self) -> int:
        return int(os.environ.get("MICROSTEPS_DONE", "0"))

    @done.setter
    def done(self, number: int) -> None:
        os.environ["MICROSTEPS_DONE"] = str(number)


def train(folder: Path, name: str, strategy: str, nproc: int, task: dure.Task, **settings) -> Path:
    usual = {"snapshot_every": 1, "record_samples": True, "start": "fork"}
    usual |= {"global_batch_size": BATCH, "samples": SAMPLES}
    summary = dure.train(
        task, strategy=strategy, nproc=nproc, runs_dir=folder, name=name, quiet=True, device="cpu",
        threads=1, **(usual | settings),
    )  # fmt: skip
    return Path(summary.run)


def restarts_of(run: Path) -> list[dict]:
    return RunFiles(run).events("restart")


def each_step_once(run: Path, num_ranks: int) -> bool:
    steps = -(-44 // BATCH) * (SAMPLES // 44) + -(-(SAMPLES % 44) // BATCH)
    used = [[record["step"] for record in records_of(run, rank)] for rank in range(num_ranks)]
    return all(numbers == list(range(1, steps + 1)) for numbers in used)


PLACES = [
    pytest.param(name, 3 if info.many_devices else 1, marks=[] if name in ("ddp", "single") else pytest.mark.slow)
    for name, info in STRATEGIES.items()
    if info.is_exact
]


@pytest.mark.parametrize(("strategy", "nproc"), PLACES)
def test_run_when_a_rank_is_killed_then_its_weights_are_those_of_the_undisturbed(strategy, nproc, tmp_path):
    dropout = 0.0 if strategy in (*LAYERED, *ADD_AS_THEY_COME) else 0.2
    kinds = {"layered": strategy in LAYERED, "dropout": dropout, "optimizer": "adamw"}
    rank = 0 if STRATEGIES[strategy].one_process or strategy in FIRST_RANK_COMPUTES else nproc - 1
    undisturbed = train(tmp_path, "undisturbed", strategy, nproc, Mortal(**kinds))
    flag = str(tmp_path / "flag")
    killed = train(tmp_path, "killed", strategy, nproc, Mortal(place=(rank, 12), flag=flag, **kinds))
    assert len(restarts_of(killed)) == 1
    assert each_step_once(killed, 1)
    difference = largest_difference(weights_of(undisturbed), weights_of(killed))
    assert difference <= (TO_ROUNDING if strategy in ADD_AS_THEY_COME else 0.0)


def last_step(run: RunFiles) -> int:
    return max((record["step"] for record in run.records(0)), default=0)


EPOCHS = 40
"""Number of epochs that five kills, and what goes on after each, take."""


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(2))
def test_run_when_a_rank_is_killed_at_any_moment_then_it_is_as_if_it_never_was(seed, prewarmed: Prewarmed, tmp_path):
    draw = random.Random(seed)
    task = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
    same = ("train", task, "--nproc", 2, "--global-batch-size", 8, "--epochs", EPOCHS, "--task.adam", "true", "--quiet")
    control = prewarmed.run(tmp_path, *same, "--name", "control")
    assert control.code == 0, control.err
    # every step's own snapshot, and as many as dure itself finds worth their time
    how_often = ("--snapshot-every", 1) if seed % 2 else ()
    command = prewarmed.start(
        tmp_path, *same, *how_often, "--record-samples", "--task.pause-seconds", 0.002, "--max-restarts", 20,
        "--name", "run",
    )  # fmt: skip
    run, reached = RunFiles(tmp_path / "runs/run"), 0
    for number in range(5):
        # not in the step of the last kill: the same failure at the same step twice ends a run
        wait_until(lambda reached=reached: last_step(run) > reached + 1 or command.code is not None, "a step")
        time.sleep(draw.random() * 0.1)
        if command.code is None:
            os.kill(draw.choice(command.ranks(2)), signal.SIGKILL)
        wait_until(lambda number=number: len(run.events("restart")) > number or command.code is not None, "a restart")
        reached = max(reached, last_step(run), *(event["step"] for event in run.events("restart")))
    assert command.wait(seconds=60) == 0, command.err
    for epoch in range(EPOCHS):
        used = [index for rank in range(2) for r in run.records(rank) if r["epoch"] == epoch for index in r["samples"]]
        assert sorted(used) == list(range(97))
    undisturbed, disturbed = weights_of(tmp_path / "runs/control"), weights_of(run.path)
    assert largest_difference(undisturbed, disturbed) == 0.0


def test_run_when_the_same_failure_comes_again_at_its_step_then_it_ends(tmp_path):
    order = SampleOrder(97, BATCH, seed=0, shuffle=True, drop_last=False)
    batches = list(order.batches(0, 97))
    with pytest.raises(WorkerFailed, match=r"a planned failure[\s\S]*the same failure came again at step 10"):
        train(tmp_path, "run", "ddp", 2, Faulty(fault="raise", place="dataset", step=int(batches[9].indices[-1])))
    assert len(restarts_of(tmp_path / "run")) == 1


@pytest.mark.slow
def test_run_when_an_exception_comes_only_once_then_it_goes_on(tmp_path):
    task = Mortal(fault="raise", place=(1, 5), flag=str(tmp_path / "raised"))
    run = train(tmp_path, "run", "ddp", 2, task)
    assert each_step_once(run, 2)
    (restart,) = restarts_of(run)
    assert (restart["rank"], restart["step"]) == (1, 5)
    assert "ValueError: a planned failure" in restart["message"]


def test_run_when_its_first_step_raises_then_it_is_not_tried_again(tmp_path):
    with pytest.raises(WorkerFailed, match="a planned failure"):
        train(tmp_path, "run", "ddp", 2, Mortal(fault="raise", place=(1, 1)))
    assert not restarts_of(tmp_path / "run")


@pytest.mark.slow
def test_run_when_its_restarts_are_used_up_then_it_says_so(tmp_path):
    with pytest.raises(WorkerFailed, match=r"2 restarts within 600 s are used up \(max_restarts=\)"):
        train(tmp_path, "run", "ddp", 2, MortalProcess(place=(1, 4)), max_restarts=2)
    assert [restart["step"] for restart in restarts_of(tmp_path / "run")] == [4, 7]


def test_run_when_nothing_may_be_restarted_then_the_first_failure_ends_it(tmp_path):
    with pytest.raises(WorkerFailed, match=r"rank 1 was killed \(SIGKILL\)"):
        train(tmp_path, "run", "ddp", 2, Mortal(place=(1, 4)), max_restarts=0)
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] <= 4


@pytest.mark.slow
def test_run_when_memory_has_no_room_for_snapshots_then_it_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr("dure.training.run_state.snapshot_policy.MOST_OF_MEMORY", 1e-9)
    task = Mortal(place=(1, 12), flag=str(tmp_path / "flag"))
    run = train(tmp_path, "run", "ddp", 2, task, checkpoint={"background": False})  # it is on the disk before the kill
    warnings = [event["message"] for event in RunFiles(run).events("warning")]
    assert all("so none are taken" in warning for warning in warnings)  # before and after the kill
    assert warnings
    (resumed,) = RunFiles(run).events("resumed")
    assert resumed["step"] == 7
    assert each_step_once(run, 2)


@pytest.mark.slow
def test_run_when_its_ranks_were_spawned_then_they_are_spawned_again(tmp_path):
    task = Mortal(place=(1, 12), flag=str(tmp_path / "flag"))
    run = train(tmp_path, "run", "ddp", 2, task, start="spawn")
    (restart,) = restarts_of(run)
    assert restart["step"] == 12
    assert not RunFiles(run).events("resumed")
    assert each_step_once(run, 2)
