"""Meshes of fsdp with an axis `tensor`: ranks with the same samples divide layers, and others divide these parts."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from dure.comm.groups import ProcessGroup
from dure.errors import DureError
from dure.strategies.state.tensor_shard import Rectangle, TensorShard, own_shard
from tests.comm.gloo_ranks import on_ranks
from tests.conformance.cases import (
    TO_ROUNDING,
    largest_difference,
    train_case,
    weights_of,
)
from tests.conformance.tasks import Regression
from tests.conformance.test_failures import Branching
from tests.conformance.zoo.feature import STEPS as ZOO_STEPS
from tests.conformance.zoo.feature import ZooTask
from tests.strategies.sharded.sharded_cases import SentBytes, backward, held_bytes, prepared

STEPS = {"global_batch_size": 7, "samples": 58, "clip_norm": 0.4, "seed": 5}


@pytest.mark.slow
def test_parameters_that_some_ranks_or_none_use_give_the_weights_of_one_process(trained, tmp_path):
    task = Branching(never=True, optimizer="adamw")
    one = weights_of(trained(task, **STEPS))
    run = train_case(tmp_path, task, "fsdp", 4, mesh="shard=2,tensor=2", microbatch_size=1, **STEPS)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


class Scaled(ZooTask):
    """Has 0-dim parameters, before and between divided layers."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

        def forward(self, x):
            return x * self.factor

    def build_model(self):
        layers = [self.Scale(), nn.Linear(6, 8), self.Scale(), nn.Tanh(), nn.Linear(8, 3)]
        return nn.Sequential(*layers).double()


def test_scalars_have_the_gradient_of_each_sample_once(trained, tmp_path):
    run = train_case(tmp_path, Scaled(), "fsdp", 4, mesh="shard=2,tensor=2", **ZOO_STEPS)
    assert largest_difference(weights_of(run), weights_of(trained(Scaled(), **ZOO_STEPS))) < TO_ROUNDING


def pair() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False))


def test_ranks_hold_a_part_of_a_part_and_say_what_they_send():
    def work(group: ProcessGroup) -> tuple[dict[str, int], int, int]:
        strategy = prepared("fsdp", group, pair(), mesh="shard=2,tensor=2")
        # the batch asks for a gradient, as an activation does
        batches = [torch.ones(2, 8, requires_grad=True) for _ in range(2)]
        backward(strategy, *batches)
        strategy.optimizer_step()
        with SentBytes() as sent:
            backward(strategy, *batches)
        answer = held_bytes(strategy), sent.num_bytes, strategy.sent_bytes(2)
        strategy.close()
        return answer

    for held, counted, told in on_ranks(4, work):
        assert held["parameters"] == held["gradients"] == 2 * 8 * 16 * 4 // 4
        assert held["state"] == 2 * held["parameters"]
        assert counted == told


def test_shards_of_sizes_that_do_not_divide_are_saved_where_they_belong():
    def uneven() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 7))

    def work(group: ProcessGroup) -> list[TensorShard]:
        strategy = prepared("fsdp", group, uneven(), mesh="shard=3,tensor=2")
        shards = [own_shard(value) for value in strategy.state_dict().model.values()]
        shards = [replace(shard, tensor=shard.tensor.detach().clone()) for shard in shards]
        strategy.close()
        return shards

    for shards, whole in zip(zip(*on_ranks(6, work), strict=True), uneven().state_dict().values(), strict=True):
        found = torch.full_like(whole, torch.nan)
        for shard in shards:
            assert shard.rectangle.fits(tuple(whole.shape))
            found[shard.rectangle.within(Rectangle.of_whole(whole.shape))] = shard.tensor
        assert torch.equal(found, whole)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"compile": True}, "compile does not go with layers that are divided over the axis tensor"),
        ({"sync_batchnorm": True}, "sync_batchnorm does not go with layers that are divided over the axis tensor"),
        ({"tensor_plan": "7=column"}, "plan names 7, which fits no module of the model"),
        ({"mesh": "shard=2,data=2"}, "mesh names the axis data, which this strategy does not have"),
        (
            {"mesh": "shard=4", "tensor_plan": "0=column"},
            "tensor_plan is about layers that the axis tensor of the mesh divides",
        ),
        ({"mesh": "shard=2"}, "mesh shard 2 needs 2: start as many, or set mesh to shard=4"),
    ],
    ids=repr,
)
def test_settings_that_do_not_go_with_the_mesh_are_refused(settings, sentence, tmp_path):
    with pytest.raises(DureError, match=sentence):
        train_case(tmp_path, ZooTask(), "fsdp", 4, **{"mesh": "shard=2,tensor=2", **ZOO_STEPS, **settings})


def test_model_that_the_task_compiles_is_refused(tmp_path):
    class Compiled(ZooTask):
        def build_model(self):
            return torch.compile(super().build_model(), backend="eager")

    with pytest.raises(DureError, match="the task compiles the model, which does not go with layers that are divided"):
        train_case(tmp_path, Compiled(), "fsdp", 4, mesh="shard=2,tensor=2", **ZOO_STEPS)


class UsedOutside(ZooTask):
    """Uses parameters of a unit outside of its forward: its layers, or a parameter that they leave whole."""

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.linear = nn.Embedding(4, 6), nn.Linear(6, 6)
            self.scale = nn.Parameter(torch.full((6,), 0.5))

        def forward(self, x):
            return self.linear(x) * self.scale + self.embedding(x.long().clamp(0, 3)).sum(1)

    class Uses(nn.Module):
        def __init__(self, use) -> None:
            super().__init__()
            self.unit, self.use, self.out = UsedOutside.Unit(), use, nn.Linear(6, 3)

        def forward(self, x):
            return self.out(self.unit(x) + self.use(self.unit, x))

    def __init__(self, use) -> None:
        self.use = use

    def build_model(self):
        return self.Uses(self.use).double()

    def eval_data(self):
        return None


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda unit, x: unit.embedding(x.long().clamp(0, 3)).sum(1), "a divided layer"),
        pytest.param(lambda unit, x: unit.linear(x), "linear", marks=pytest.mark.slow),
        (lambda unit, x: x + unit.scale.square().sum(), "add"),
    ],
    ids=["embedding", "linear", "parameter"],
)
def test_parameters_of_a_unit_that_are_used_outside_of_it_are_refused(use, name, tmp_path):
    sentence = rf"used outside that unit's forward \({name}\), .* return what needs it"
    with pytest.raises(DureError, match=sentence) as found:
        train_case(tmp_path, UsedOutside(use), "fsdp", 4, mesh="shard=2,tensor=2", units="unit", **ZOO_STEPS)
    assert found.value.exit_code == 2


@pytest.mark.slow
def test_numbers_that_are_read_from_parameters_of_a_unit_are_those_of_the_whole(trained, tmp_path):
    task = UsedOutside(lambda unit, x: x / (unit.scale.norm().item() + unit.linear.weight.norm().item()))
    run = train_case(tmp_path, task, "fsdp", 4, mesh="shard=2,tensor=2", units="unit", **ZOO_STEPS)
    assert largest_difference(weights_of(run), weights_of(trained(task, **ZOO_STEPS))) < TO_ROUNDING


def test_start_says_what_is_divided_and_how():
    def work(group: ProcessGroup) -> list[str]:
        strategy = prepared("fsdp", group, pair(), mesh="shard=2,tensor=2")
        lines = strategy.describe()
        strategy.close()
        return lines

    lines = on_ranks(4, work)[0]
    assert lines[0].endswith("of parameters in 2 shard(s), of what each of 2 ranks of a tensor group has")
    assert "row (input features divided, the output added up): 2" in lines


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "mesh"),
    [("tensor_parallel", 3, None), ("pipeline", 3, None), ("fsdp", 4, "shard=2,tensor=2")],
)
def test_batch_may_be_smaller_than_the_ranks_if_some_work_on_the_same_samples(
    strategy, num_ranks, mesh, trained, tmp_path
):
    steps = {**ZOO_STEPS, "global_batch_size": 2, "samples": 6}
    run = train_case(tmp_path, ZooTask(), strategy, num_ranks, mesh=mesh, **steps)
    assert largest_difference(weights_of(run), weights_of(trained(ZooTask(), **steps))) < TO_ROUNDING


def test_batch_that_is_smaller_than_the_groups_of_ranks_is_refused(tmp_path):
    sentence = "less than one sample for each of 2 groups of 2 devices: raise it to at least 2 or lower nproc"
    with pytest.raises(DureError, match=sentence):
        train_case(tmp_path, ZooTask(), "fsdp", 4, mesh="shard=2,tensor=2", **{**ZOO_STEPS, "global_batch_size": 1})


@pytest.mark.parametrize(
    ("mesh", "precision", "declared"),
    [
        ("tensor=2", "fp32", []),
        ("tensor=2", "bf16", ["bf16 and fp16"]),
        ("shard=2", "fp32", ["random numbers in model"]),
    ],
)
def test_differences_are_declared_where_there_are_any(mesh, precision, declared, tmp_path):
    task = Regression(dtype="float32", dropout=0.3, layered=True)
    run = train_case(tmp_path, task, "fsdp", 2, mesh=mesh, precision=precision, global_batch_size=7, samples=14)
    found = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert [text[: len(word)] for text, word in zip(found, declared, strict=True)] == declared
