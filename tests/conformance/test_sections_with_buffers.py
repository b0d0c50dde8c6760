"""Models with buffers, cut into sections: skipped steps and restarts from memory end where one process does."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dure
from dure.errors import WorkerFailed
from dure.training.run_state.snapshot_policy import MemorySaver
from tests.commands import RunFiles
from tests.conformance.cases import TO_ROUNDING, largest_difference, train_case, weights_of
from tests.conformance.tasks import Normalised
from tests.conformance.zoo.feature import HIDDEN, IN, OUT, ZooTask, chain
from tests.conformance.zoo.feature import STEPS as SHORT

STEPS = {"samples": 88, "global_batch_size": 8, "microbatch_size": 8, "seed": 4}


class Poisoned(Normalised):
    """Has a sample that is not a number."""

    def train_data(self):
        data = super().train_data()
        data.tensors[0][5] = float("nan")
        return data


@pytest.mark.slow
def test_step_when_it_is_skipped_then_statistics_are_those_of_one_process(tmp_path):
    one, many = (train_case(tmp_path, Poisoned(), *how, on_nonfinite="skip", **STEPS) for how in [(), ("pipeline", 2)])
    assert [len(RunFiles(run).events("step_skipped")) for run in (one, many)] == [2, 2]
    assert largest_difference(weights_of(one), weights_of(many)) < TO_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pipeline", "rpc_model"])
def test_snapshot_when_a_rank_is_late_with_it_then_it_is_of_its_own_step(strategy, tmp_path, monkeypatch):
    take = MemorySaver.take

    def late(self, *args):
        if self.session.group.rank == 1:
            time.sleep(0.1)
        return take(self, *args)

    monkeypatch.setattr(MemorySaver, "take", late)
    faults = tmp_path / "faults.toml"
    faults.write_text('[[fault]]\nrank = 1\nstep = 5\nkind = "kill"\n')
    again = {"faults": faults, "max_restarts": 1, "snapshot_every": 1}
    one = train_case(tmp_path, Normalised(), **STEPS)
    many = train_case(tmp_path, Normalised(), strategy, 2, **again, **STEPS)
    assert largest_difference(weights_of(one), weights_of(many)) < TO_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pipeline", "rpc_model"])
def test_rank_when_killed_then_all_go_on_from_memory_to_the_weights_of_one_process(strategy, tmp_path):
    faults = tmp_path / "faults.toml"
    faults.write_text('[[fault]]\nrank = 1\nstep = 5\nkind = "kill"\n')
    again = {"faults": faults, "max_restarts": 1, "snapshot_every": 1}
    one, many = (
        train_case(tmp_path, Normalised(), **STEPS),
        train_case(tmp_path, Normalised(), strategy, 2, **again, **STEPS),
    )
    (restart,) = RunFiles(many).events("restart")
    assert restart["step"] == 5
    assert largest_difference(weights_of(one), weights_of(many)) < TO_ROUNDING


class Shifted(nn.Sequential):
    """Layers with a buffer of the whole model, added to the input or to the output."""

    def __init__(self, *, is_added_first: bool) -> None:
        super().__init__(*chain())
        self.is_added_first = is_added_first
        self.register_buffer("shift", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.shift) if self.is_added_first else super().forward(x) + self.shift


class ShiftedByOutput(Shifted):
    """Sets the buffer in evaluations alone, on the last rank."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if not self.training:
            self.shift.lerp_(output.detach().mean(), 0.5)
        return output


class SetByModel(ZooTask):
    """Has the model set the buffer."""

    is_added_first: bool = True

    def build_model(self) -> nn.Module:
        return ShiftedByOutput(is_added_first=self.is_added_first)


class SetByMetrics(ZooTask):
    """Sets the buffer in the metrics, which only the first rank of `rpc_model` computes."""

    def build_model(self) -> nn.Module:
        return Shifted(is_added_first=False)

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        model.shift.add_(1)
        return {"shift": dure.Sum(model.shift, 1)}


@pytest.mark.parametrize(
    ("task", "strategy", "is_missed"),
    [
        (SetByModel(), "pipeline", True),
        (SetByModel(is_added_first=False), "rpc_model", False),
        (SetByMetrics(), "rpc_model", True),
        pytest.param(SetByModel(), "rpc_model", True, marks=pytest.mark.slow),
        pytest.param(SetByModel(is_added_first=False), "pipeline", False, marks=pytest.mark.slow),
        pytest.param(SetByMetrics(), "pipeline", False, marks=pytest.mark.slow),
    ],
)
def test_buffer_when_an_evaluation_sets_it_on_some_ranks_then_that_is_declared_unless_no_other_uses_it(
    task: ZooTask, strategy: str, is_missed: bool, tmp_path: Path
) -> None:
    one, many = (train_case(tmp_path, task, *how, eval_every_epochs=1, **SHORT) for how in [(), (strategy, 2)])
    declared = json.loads((many / "summary.json").read_text())["not_preserved"]
    assert any("state that the evaluation keeps (model.shift)" in text for text in declared) == is_missed
    assert (largest_difference(weights_of(one), weights_of(many)) > TO_ROUNDING) == is_missed


class FollowsGradient(ZooTask):
    """Divides its loss by the size of a gradient, which a hook notes."""

    def __init__(self, layer: int, *, uses_size: bool = True) -> None:
        self.layer, self.uses_size, self.size = layer, uses_size, 1.0

    def build_model(self) -> nn.Module:
        model = chain()
        model[self.layer].weight.register_hook(self._note)
        return model

    def _note(self, gradient: Tensor) -> None:
        self.size = float(gradient.norm())

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) / (1 + self.size * self.uses_size * model.training)


def test_hook_when_it_sets_what_the_loss_of_another_rank_uses_then_rpc_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"separates the hooks on gradients that set task\.size from the loss"):
        train_case(tmp_path, FollowsGradient(6), "rpc_model", 2, **SHORT)
    for task in (FollowsGradient(0), FollowsGradient(6, uses_size=False)):
        one, many = (train_case(tmp_path, task, *how, **SHORT) for how in [(), ("rpc_model", 2)])
        assert largest_difference(weights_of(one), weights_of(many)) < TO_ROUNDING


class Rolled(nn.Module):
    """A layer with a mask on its weight that moves on with each batch, in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.register_buffer("mask", (torch.arange(width) % 3 > 0).float())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mask.copy_(self.mask.roll(1))
        return functional.linear(x, self.linear.weight * self.mask)


class RolledInPlace(ZooTask):
    def build_model(self) -> nn.Module:
        model = chain()
        return nn.Sequential(Rolled(model[0].in_features), *model).double()


def test_buffer_that_an_earlier_microbatch_needs_when_a_stage_changes_it_in_place_then_it_is_refused(tmp_path):
    with pytest.raises(WorkerFailed, match=r"changes 0\.mask in place, and the backward of an earlier") as caught:
        train_case(tmp_path, RolledInPlace(), "pipeline", 2, **{**STEPS, "microbatch_size": 2})
    assert caught.value.exit_code == 2


class CountsForTheLast(ZooTask):
    """Scales the output by a number of calls, which the first block counts in a buffer that both have."""

    def build_model(self) -> nn.Module:
        class Block(nn.Module):
            def __init__(self, calls: Tensor, inputs: int, outputs: int, *, counts: bool) -> None:
                super().__init__()
                self.layer, self.counts = nn.Linear(inputs, outputs).double(), counts
                self.register_buffer("calls", calls)

            def forward(self, x: Tensor) -> Tensor:
                if self.counts and self.training:
                    self.calls += 1
                return self.layer(x).tanh() * (1 + 0.1 * self.calls)

        calls = torch.zeros((), dtype=torch.float64)
        return nn.Sequential(Block(calls, IN, HIDDEN, counts=True), Block(calls, HIDDEN, OUT, counts=False))


@pytest.mark.parametrize("strategy", ["rpc_model", "pipeline"])
def test_buffer_of_two_sections_when_one_of_them_changes_it_then_is_refused(strategy: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"0\.calls and 1\.calls are one buffer, which forward changes") as found:
        train_case(tmp_path, CountsForTheLast(), strategy, 2, **SHORT)
    assert found.value.exit_code == 2
