"""Checkpoints of weights that are not finite are not written, and the run ends; what was made infinite may be."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import dure
from dure.comm.groups import Solo
from dure.errors import WeightsNotFinite, WorkerFailed
from dure.training.checkpoints.finite_check import FiniteCheck, finite_parameters
from dure.training.checkpoints.state import Snapshot
from dure.training.checkpoints.store import CheckpointStore
from tests.conformance.tasks import WIDTH, Regression
from tests.training.checkpoints.checkpoint_cases import ThreadGroup, at, new_store, save

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_check_when_one_number_of_any_is_not_finite_then_it_is_found(dtype):
    check = FiniteCheck({"w": dtype})
    finite = torch.finfo(dtype)
    values = torch.tensor([0.0, -0.0, finite.max, finite.min, finite.tiny, -1.5, 2.0], dtype=dtype)
    assert bool(torch.view_as_real(values).isfinite().all() if dtype.is_complex else values.isfinite().all())
    check("w", values.view(torch.uint8).numpy().data)
    for bad in (math.nan, math.inf, -math.inf):
        changed = values.clone()
        changed[4] = bad
        data = changed.view(torch.uint8).numpy().data
        with pytest.raises(WeightsNotFinite, match="the parameter w is not finite"):
            check("w", data)
        check("other", data)
        check(None, data)


def masked() -> nn.Module:
    model = nn.Linear(2, 2)
    model.mask = nn.Parameter(torch.tensor([0.0, -math.inf]), requires_grad=False)
    model.register_buffer("lowest", torch.tensor(math.inf))
    model.whole = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    return model


def save_model(store: CheckpointStore, model: nn.Module, finite: frozenset[str], samples: int) -> Any:
    return save(store, Snapshot(model=model.state_dict(), finite=finite), at(samples), Solo())


def test_checkpoint_when_a_parameter_is_not_finite_any_more_is_left_out_and_those_before_it_stay(tmp_path):
    store, _ = new_store(tmp_path)
    model = masked()
    finite = finite_parameters(model)
    assert finite == {"weight", "bias", "whole"}
    first = save_model(store, model, finite, 8).path
    with torch.no_grad():
        model.weight[1, 1] = math.nan
    with pytest.raises(
        WeightsNotFinite, match=r"the parameter weight is not finite after step 2, .* 16 samples is left"
    ):
        save_model(store, model, finite, 16)
    assert store.newest_valid() == first
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_ranks_when_the_weights_of_one_are_not_finite_fail_alike(tmp_path):
    def save_on(group: Any) -> Any:
        from dure.strategies.state.tensor_shard import TensorShard

        rows = torch.full((1, 2), math.inf if group.rank == 1 else 1.0)
        model = {"w": TensorShard(tensor=rows, offsets=(group.rank, 0), shape=(3, 2))}
        return save(new_store(tmp_path)[0], Snapshot(model=model, finite=frozenset({"w"})), at(8), group)

    answers = ThreadGroup(3).run(save_on)
    assert [type(answer) for answer in answers] == [WeightsNotFinite] * 3
    assert not list(tmp_path.iterdir())


class Spoiling(SGD):
    """Makes a weight NaN that the loss does not show."""

    def step(self, closure: Any = None) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 9:
            self.param_groups[0]["params"][1].data.fill_(math.nan)
        return super().step(closure)


class Spoiled(Regression):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.unseen = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        return model

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Spoiling(model.parameters(), lr=0.01)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) + 0 * model.unseen.nan_to_num().sum()


@pytest.mark.parametrize("is_async", [True, False])
def test_run_when_its_weights_are_not_finite_ends_with_the_last_good_checkpoint(is_async, tmp_path: Path):
    with pytest.raises(WorkerFailed, match=r"the parameter unseen is not finite after step \d+") as failed:
        dure.train(
            Spoiled(), strategy="ddp", nproc=2, samples=440, global_batch_size=11, runs_dir=tmp_path, name="run",
            start="fork", threads=1, quiet=True, device="cpu", checkpoint={"background": is_async},
        )  # fmt: skip
    assert failed.value.exit_code == 1
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    assert not [event for event in events if event["event"] == "restart"]
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("samples-*"))
    assert saved == ["samples-000000000044", "samples-000000000088"]
