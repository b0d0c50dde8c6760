"""An error on one rank stops all of them at that step, and is reported in one sentence."""

import json
import math
import os
import time
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

import dure
from dure.data import TensorData
from dure.errors import WorkerFailed
from dure.strategies.table import STRATEGIES
from tests.conformance.cases import (
    MANY,
    TELLING_PAIRS,
    TO_ROUNDING,
    crossed,
    is_layered,
    largest_difference,
    records_of,
    train_case,
    weights_of,
)
from tests.conformance.tasks import Regression

STEPS = {"global_batch_size": 6, "epochs": 1, "seed": 8, "checkpoint": {"every_samples": 12}}


class Poisoned(Regression):
    """One sample's loss is not finite."""

    sample: int = 20
    value: float = math.nan

    def train_data(self):
        columns = super().train_data().tensors
        return TensorData(*columns, torch.arange(len(columns[0])))

    def loss(self, model, batch):
        loss = super().loss(model, batch[:3])
        is_poisoned = len(batch) > 3 and bool((batch[3] == self.sample).any())
        return loss + self.value if is_poisoned else loss


@pytest.mark.parametrize(("strategy", "num_devices", "value"), crossed(TELLING_PAIRS, [(math.nan,), (math.inf,)]))
def test_a_loss_that_is_not_finite_stops_all_at_that_step_and_names_rank_step_and_samples(
    strategy, num_devices, value, trained, tmp_path
):
    layered = is_layered(strategy)
    healthy = trained(Regression(layered=layered), strategy, num_devices, record_samples=True, **STEPS)
    num_ranks = 1 if STRATEGIES[strategy].one_process else num_devices
    step, rank, samples = next(
        (record["step"], rank, record["samples"])
        for rank in range(num_ranks)
        for record in records_of(healthy, rank)
        if 20 in record["samples"]
    )
    shown = ", ".join(map(str, samples))
    match = rf"the loss is {value:g} at step {step} of epoch 1: (on every rank: )?rank {rank}, samples \[{shown}\]"
    with pytest.raises(WorkerFailed, match=match) as caught:
        train_case(tmp_path / "poisoned", Poisoned(value=value, layered=layered), strategy, num_devices, **STEPS)
    assert caught.value.exit_code == 1
    run = next((tmp_path / "poisoned").iterdir())
    assert {len(records_of(run, rank)) for rank in range(num_ranks)} == {step - 1}
    saved = [int(path.name.split("-")[1]) for path in (run / "checkpoints").glob("samples-*")]
    assert max(saved) == (step - 1) * 6 // 12 * 12
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"


class Uncounted(Regression):
    """Task whose third batch counts nothing."""

    def train_data(self):
        x, y, mask = super().train_data().tensors
        mask[12:18] = False
        return TensorData(x, y, mask)


@pytest.mark.parametrize(("strategy", "num_devices"), MANY)
def test_a_batch_that_counts_nothing_is_refused_with_its_step(strategy, num_devices, tmp_path):
    task = Uncounted(kind="tokens", layered=is_layered(strategy))
    with pytest.raises(WorkerFailed, match="the loss of step 3 has a count of 0 over all ranks: there is nothing to"):
        train_case(tmp_path, task, strategy, num_devices, shuffle=False, **STEPS)


@pytest.mark.slow
def test_a_rank_whose_share_counts_nothing_is_no_failure(tmp_path):
    """Only the first half of the third batch counts: the second rank's share of it has no token."""
    one, two = [
        weights_of(train_case(tmp_path, HalfCounted(kind="tokens"), name, n, shuffle=False, **STEPS))
        for name, n in (("single", 1), ("ddp", 2))
    ]
    assert largest_difference(one, two) < TO_ROUNDING


def test_a_part_in_which_a_mean_counts_nothing_is_told_as_such_where_there_are_parts(tmp_path):
    assert all(weight.isfinite().all() for weight in weights_of(train_case(tmp_path, Masked(), **STEPS)).values())
    with pytest.raises(WorkerFailed, match=r"loss is nan at step 3.* no mean over samples.* return dure\.Sum"):
        train_case(tmp_path, Masked(), "ddp", 2, shuffle=False, **STEPS)
    with pytest.raises(WorkerFailed, match=r"loss is nan at step 1 .*samples \[.*\]; look at these"):
        train_case(tmp_path, Masked(factor=math.nan), **STEPS)


class Masked(Regression):
    """A mean over what is not masked; samples 15 to 17 are, a rank's whole share of the third batch."""

    factor: float = 1.0

    def train_data(self):
        x, y, mask = super().train_data().tensors
        mask[15:18] = False
        return TensorData(x, y, mask)

    def loss(self, model, batch):
        x, y, mask = batch
        return (model(x) - y)[mask].square().mean() * self.factor


class HalfCounted(Regression):
    def train_data(self):
        x, y, mask = super().train_data().tensors
        mask[15:18] = False
        return TensorData(x, y, mask)


class Branching(Regression):
    """A model of which some batches leave a part unused, and one part is never used."""

    never: bool = False

    def build_model(self):
        return Branches(super().build_model(), self.never)


class Branches(nn.Module):
    def __init__(self, main, has_spare):
        super().__init__()
        self.main = main
        self.rare = nn.Linear(6, 6, dtype=torch.float64)
        self.spare = nn.Linear(6, 6, dtype=torch.float64) if has_spare else None

    def forward(self, x):
        y = self.main(x)
        chosen = x[:, 0, 0] > 0.8
        return y + self.rare(x) * chosen[:, None, None] if bool(chosen.any()) else y


def test_ddp_names_the_parameters_that_got_no_gradient_with_the_cure(tmp_path):
    match = r"2 parameter\(s\) got no gradient in the first step.*spare\.weight, spare\.bias; pass ddp={.find_unused"
    with pytest.raises(WorkerFailed, match=match) as caught:
        train_case(tmp_path, AllBranches(never=True), "ddp", 2, **STEPS)
    assert caught.value.exit_code == 2


def test_ddp_names_the_cure_where_only_the_last_microbatch_of_one_rank_misses_a_gradient(tmp_path):
    with pytest.raises(WorkerFailed, match=r"got no gradient from a rank's last microbatch.*pass ddp={.find") as caught:
        train_case(tmp_path, MissedOnce(), "ddp", 2, shuffle=False, microbatch_size=1, **STEPS)
    assert caught.value.exit_code == 2


class MissedOnce(Branching):
    """Sample 5, the last of the second rank's share of the first batch, leaves a part unused."""

    def train_data(self):
        x, y, mask = super().train_data().tensors
        x[5] = 0
        return TensorData(x, y, mask)

    def build_model(self):
        model = super().build_model()
        model.forward = lambda x: model.main(x) + model.rare(x) if x.any() else model.main(x)
        return model


class AllBranches(Branching):
    def build_model(self):
        model = super().build_model()
        model.forward = lambda x: model.main(x) + model.rare(x)
        return model


@pytest.mark.slow
@pytest.mark.parametrize("microbatch_size", [None, 1])
def test_unused_parameters_that_are_looked_for_give_the_weights_of_one_process(microbatch_size, trained, tmp_path):
    task = Branching(never=True)
    one = weights_of(trained(task, **STEPS))
    settings = {"microbatch_size": microbatch_size, "find_unused_parameters": True, "deterministic": False}
    run = train_case(tmp_path, task, "ddp", 3, **settings, **STEPS)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING
    for record in records_of(run):
        assert record["forward_backward_seconds"] >= 0
        assert record["sync_seconds"] >= 0


class Failing(Regression):
    """Rank 1 fails in its third step."""

    def loss(self, model, batch):
        if os.environ.get("RANK") == "1" and model.training:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 3:
                raise KeyError("a sample without a label")
        return super().loss(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_on_one_rank_ends_all_and_is_the_one_that_is_shown(num_workers, tmp_path):
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"rank 1 failed after step 2: KeyError: 'a sample without a label'") as e:
        train_case(tmp_path, Failing(), "ddp", 3, num_workers=num_workers, **STEPS)
    assert "test_failures.py" in str(e.value)
    # starting takes its part of this; the ranks that wait for rank 1 would take ten minutes
    assert time.monotonic() - start < 15


class Incomplete(Regression):
    """One sample cannot be read."""

    def train_data(self):
        return Subset(Missing(), range(40))


class Missing(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 30:
            raise FileNotFoundError("sample30.jpg is not there")
        return torch.zeros(5, 6).double(), torch.zeros(5, 6).double(), torch.ones(5).bool()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_in_the_data_names_the_users_line(num_workers, tmp_path):
    with pytest.raises(WorkerFailed, match=r"FileNotFoundError.*sample30\.jpg is not there") as caught:
        train_case(tmp_path, Incomplete(), "ddp", 2, num_workers=num_workers, **STEPS)
    assert "test_failures.py" in str(caught.value)


class Different(Regression):
    """Builds something else on rank 1."""

    what: Literal["shape", "order", "dtype", "samples", "torch"] = "shape"

    @property
    def is_other(self):
        return os.environ.get("RANK") == "1"

    def build_model(self):
        if self.what == "torch" and self.is_other:
            torch.__version__ = "2.99.0"  # of this rank's process alone
        if self.what == "shape":
            return nn.Linear(6, 7 if self.is_other else 6)
        if self.what == "dtype":
            return nn.Linear(6, 6, dtype=torch.bfloat16 if self.is_other else torch.float32)
        names = ["b", "a"] if self.what == "order" and self.is_other else ["a", "b"]
        return nn.ModuleDict({name: nn.Linear(6, 6) for name in names})

    def train_data(self):
        return self._data(45 if self.what == "samples" and self.is_other else 44, 1)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("shape", r"first differing parameter is \['weight', \[6, 6\], .* on rank 0 and \['weight', \[7, 6\]"),
        ("order", r"first differing parameter is \['a.weight', .* on rank 0 and \['b.weight', "),
        ("dtype", r"first differing parameter is .*'torch.float32'\] on rank 0 and .*'torch.bfloat16'\] on rank 1"),
        ("samples", "training samples is 44 on rank 0 and 45 on rank 1"),
        ("torch", r"torch version is 2\.1.* on rank 0 and 2\.99\.0 on rank 1"),
    ],
)
def test_ranks_that_build_something_else_are_told_so_before_they_talk_of_gradients(what, said, tmp_path):
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=f"rank 0 and rank 1 do not run the same: {said}"):
        train_case(tmp_path, Different(what=what), "ddp", 2, **STEPS)
    assert time.monotonic() - began < 15  # a rank that waited for the other's gradients would have done so for minutes


@pytest.mark.slow
def test_a_failed_run_can_be_resumed_when_its_cause_is_gone(tmp_path):
    flag = tmp_path / "mended"
    with pytest.raises(WorkerFailed, match="FileNotFoundError"):
        train_case(tmp_path / "runs", Unmended(flag=str(flag)), "ddp", 2, **STEPS)
    flag.touch()
    run = next((tmp_path / "runs").iterdir())
    summary = dure.train(resume=run, start="fork", quiet=True)
    whole = train_case(tmp_path, Regression(), **STEPS)
    assert summary.steps == 8
    assert largest_difference(weights_of(run), weights_of(whole)) < TO_ROUNDING


class Unmended(Regression):
    flag: str = ""

    def loss(self, model, batch):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 5 and model.training:
            Path(self.flag).stat()
        return super().loss(model, batch)
