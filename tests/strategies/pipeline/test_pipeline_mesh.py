"""Meshes of pipeline with an axis `tensor`: ranks with the same stages and samples divide layers."""

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dure.comm.groups import ProcessGroup
from dure.errors import DureError
from tests.comm.gloo_ranks import on_ranks
from tests.conformance.cases import (
    train_case,
)
from tests.conformance.tasks import Regression
from tests.conformance.zoo.feature import STEPS as ZOO_STEPS
from tests.conformance.zoo.feature import ZooTask
from tests.strategies.sharded.sharded_cases import SentBytes, backward, held_bytes, mean_square, prepared

MESH = {"mesh": "pipeline=2,tensor=2"}


def four_layers() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)]
    return nn.Sequential(*layers, nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))


def on_mesh(look: Any) -> list[Any]:
    """Return what `look(strategy, batches)` sees on each rank of a mesh of 2 x 2."""

    def work(group: ProcessGroup) -> Any:
        plan = "0=column,1=row,2=column,3=row"
        batches = [torch.ones(2, 8) for _ in range(2)]
        strategy = prepared("pipeline", group, four_layers(), cuts="2", tensor_plan=plan, example=batches[0], **MESH)
        answer = look(strategy, batches)
        strategy.close()
        return answer

    return on_ranks(4, work)


def test_ranks_hold_a_part_of_a_stage_and_say_what_they_send():
    def look(strategy: Any, batches: list[torch.Tensor]) -> Any:
        backward(strategy, *batches)
        strategy.optimizer_step()
        with SentBytes() as sent:
            backward(strategy, *batches)
        return held_bytes(strategy), sent.num_bytes, strategy.sent_bytes(2)

    for held, counted, told in on_mesh(look):
        assert held["gradients"] == 2 * 8 * 16 * 4 // 2
        assert held["state"] == 2 * held["gradients"]
        over_cut = 2 * 2 * 8 * 4  # activations or their gradients of two microbatches, point to point
        facts = 2 * 3 * 5 * 8 // 4  # which the strategy leaves out
        assert counted - facts == told - over_cut


def test_start_says_what_is_divided_and_how():
    lines = on_mesh(lambda strategy, batches: strategy.describe())
    assert lines[0][0].startswith("cut before 2: 2 stages, schedule 1f1b")
    # those of all stages, because rank 0 shows them
    assert "column (output features divided, and the output left divided): 0+2" in lines[0]
    assert "row (input features divided, the output added up): 1+3" in lines[0]
    assert not any("whole on every rank" in line for line in lines[0])


class Tied(nn.Module):
    """Has the last layer's weight in a module that is not called, beside that layer in the plan."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.codes = four_layers(), nn.Embedding(8, 16)
        self.codes.weight = self.layers[3].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + self.codes.weight.sum(1)


def test_layer_whose_weight_is_also_outside_the_stages_stays_whole_and_tied():
    def work(group: ProcessGroup) -> Any:
        batch = torch.ones(2, 8)
        strategy = prepared("pipeline", group, Tied(), cuts="layers.2", example=batch, **MESH)
        backward(strategy, batch)
        lines, model = strategy.describe(), strategy.model
        strategy.close()
        return model.codes.weight is model.layers[3].weight, [line for line in lines if "shared" in line]

    found = on_ranks(4, work)
    assert all(is_tied for is_tied, _ in found)
    assert [lines for _, lines in found] == [["layers.3 whole: its weight is shared with a whole layer"]] * 4


class Dropping(nn.Module):
    """Drops between divided layers."""

    use_reentrant: bool | None = None
    """The kind of the activation checkpoint; None for none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def _computed(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.dropout(self.up(x), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.use_reentrant is None:
            return self._computed(x)
        return checkpoint(self._computed, x, use_reentrant=self.use_reentrant)


def slope_first(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Use the gradient of the input, by a backward of the loss's own."""
    x = x.clone().requires_grad_()
    torch.manual_seed(2)
    model(x).square().sum().backward(inputs=[x])
    torch.manual_seed(3)
    return model(x.detach() + 0.1 * x.grad.sign()).square().mean()


@pytest.mark.parametrize(
    ("use_reentrant", "strategy", "loss"),
    [
        (False, "pipeline", mean_square),
        (True, "pipeline", mean_square),
        (False, "tensor_parallel", slope_first),
    ],
)
def test_what_checkpoints_compute_again_is_what_they_computed(use_reentrant, strategy, loss):
    def gradients(group: ProcessGroup, kind: bool | None) -> list[torch.Tensor]:
        blocks = [Dropping(), Dropping()]
        blocks[1].use_reentrant = kind
        batch = torch.ones(2, 8)
        divided = prepared(strategy, group, nn.Sequential(*blocks), loss, example=batch, mesh="tensor=2")
        torch.manual_seed(1)
        backward(divided, batch)
        divided.close()
        return [parameter.grad for parameter in divided.trainable]

    def work(group: ProcessGroup) -> bool:
        found, expected = gradients(group, use_reentrant), gradients(group, None)
        return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

    assert on_ranks(2, work) == [True, True]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"compile": True}, "compile does not go with layers that are divided over the axis tensor"),
        ({"tensor_plan": "7=column"}, "plan names 7, which fits no module of the model"),
        (
            {"mesh": "pipeline=4", "tensor_plan": "0=column"},
            "tensor_plan is about layers that the axis tensor of the mesh divides",
        ),
        ({"mesh": "pipeline=2,shard=2"}, "mesh names the axis shard, which this strategy does not have"),
    ],
    ids=repr,
)
def test_settings_that_do_not_go_with_the_mesh_are_refused(settings, sentence, tmp_path):
    with pytest.raises(DureError, match=sentence):
        train_case(tmp_path, ZooTask(), "pipeline", 4, **{**MESH, **ZOO_STEPS, **settings})


class Frozen(ZooTask):
    """Freezes a layer by the optimiser's groups, which have other tensors than the model."""

    def build_schedule(self, optimizer: torch.optim.Optimizer, total_samples: int) -> Any:
        def factor(samples: int) -> float:
            if samples > 20:
                optimizer.param_groups[0]["params"][0].requires_grad_(False)
            return 1.0

        return factor


def test_layer_that_is_frozen_by_the_groups_is_refused(tmp_path):
    with pytest.raises(DureError, match="froze"):
        train_case(tmp_path, Frozen(), "pipeline", 4, **MESH, **ZOO_STEPS)


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, torch.optim.Muon], ids=lambda kind: kind.__name__)
def test_optimiser_that_reads_whole_tensors_is_refused(optimizer, tmp_path):
    class Whole(ZooTask):
        def build_model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)).double()

        def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return optimizer(model.parameters(), lr=0.1)

    with pytest.raises(DureError, match="cannot step a part of a parameter"):
        train_case(tmp_path, Whole(), "pipeline", 4, **MESH, **ZOO_STEPS)


def test_draws_are_declared_and_those_of_divided_heads_only_if_there_are_any(tmp_path):
    task = Regression(dropout=0.3, layered=True)
    run = train_case(tmp_path, task, "pipeline", 4, **MESH, global_batch_size=7, samples=14)
    (found,) = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert found.startswith("random numbers in model")
