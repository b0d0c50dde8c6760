"""Models and optimisers with state of their own kinds: a killed run ends with the weights of the undisturbed one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import dure
from dure.errors import DureError
from tests.conformance.cases import largest_difference, train_case, weights_of
from tests.conformance.tasks import WIDTH
from tests.conformance.zoo.cell import reference_of, run_cell
from tests.conformance.zoo.feature import STEPS, Feature, ZooTask
from tests.faults.test_restarts import SAMPLES, Mortal, restarts_of, train


class Gained(nn.Linear):
    """A layer whose output grows with the batches that it has seen, which it keeps as extra state."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += self.training
        return super().forward(x) * (1 + 0.01 * self.seen)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Clocked(SGD):
    """Counts steps beside `state` and `param_groups`, and steps less far in each."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["dampening"] = 1 / (1 + self.steps)
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.steps = state_dict["steps"]


class Renewed(Optimizer):
    """Makes its mean anew in each step, and counts in groups and in the state of each parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "rounds": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["rounds"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(p)) + p.grad
                p -= group["lr"] * state["mean"] / (state["steps"] + group["rounds"])


class Odd(Mortal):
    """The model or the optimiser with odd state."""

    clocked: bool = True

    def build_model(self) -> nn.Module:
        if not self.clocked:
            return super().build_model()
        dtype = torch.float64
        return nn.Sequential(nn.Linear(WIDTH, 8, dtype=dtype), nn.Tanh(), Gained(8, WIDTH, dtype=dtype))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Clocked(model.parameters(), lr=0.1, momentum=0.9) if self.clocked else Renewed(model.parameters())

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "clocked", "rank"), [("ddp", True, 1), ("zero1", False, 1), ("parameter_server", False, 1)]
)
def test_run_when_a_rank_is_killed_goes_on_with_all_state_of_the_task(strategy, clocked, rank, tmp_path: Path):
    odd: dict[str, Any] = {"clocked": clocked}
    undisturbed = train(tmp_path, "undisturbed", strategy, 2, Odd(**odd))
    killed = train(tmp_path, "killed", strategy, 2, Odd(place=(rank, 12), flag=str(tmp_path / "flag"), **odd))
    assert [restart["step"] for restart in restarts_of(killed)] == [12]
    assert largest_difference(weights_of(undisturbed), weights_of(killed)) == 0.0


def test_run_when_resumed_from_the_disk_goes_on_with_all_state_of_the_task(tmp_path: Path):
    whole = train(tmp_path, "whole", "ddp", 2, Odd())
    begun = train(tmp_path, "begun", "ddp", 2, Odd(), samples=2 * 44)
    dure.train(resume=begun, samples=SAMPLES, quiet=True)
    assert largest_difference(weights_of(whole), weights_of(begun)) == 0.0


class Follows(SGD):
    """Steps less far with each call of its task's loss."""

    owner: Any = None

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["dampening"] = 1 - 1 / (1 + self.owner.calls)
        return super().step(closure)


class CountedForOptimizer(ZooTask):
    """Counts the calls of its loss, for an optimiser that holds the task."""

    calls = 0

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = Follows(model.parameters(), lr=0.1, momentum=0.5)
        optimizer.owner = self
        return optimizer

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.calls += model.training
        return super().loss(model, batch)


@pytest.mark.parametrize(
    ("strategy", "is_taken"),
    [
        ("parameter_server", False),
        *(
            pytest.param(strategy, strategy == "ddp", marks=pytest.mark.slow)
            for strategy in ("pipeline", "rpc_model", "ddp")
        ),
    ],
)
def test_optimiser_when_it_follows_the_task_then_it_is_refused_where_ranks_step_that_compute_no_loss(
    strategy: str, is_taken: bool, tmp_path: Path
) -> None:
    if is_taken:
        feature = Feature(name="Follows", group="", title="", task=CountedForOptimizer)
        assert run_cell(feature, strategy, "straight", reference_of(feature, tmp_path), tmp_path).kind == "exact"
        return
    said = r"changes optimizer\.owner\.calls, which the optimiser's step may use"
    with pytest.raises(DureError, match=said) as caught:
        train_case(tmp_path, CountedForOptimizer(), strategy, 2, **STEPS)
    assert caught.value.exit_code == 2


class Told(SGD):
    """Steps as far as a number says that others set."""

    value = 1.0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.05 * min(2.0, self.value)
        return super().step(closure)


class ToldByLoss(ZooTask):
    """Tells the optimiser the loss of each batch (Polyak's step)."""

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        self.told = Told(model.parameters(), lr=0.1)
        return self.told

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        if model.training:
            self.told.value = float(loss)
        return loss


class ToldLate(ToldByLoss):
    """Tells the optimiser the loss of each batch after a few batches."""

    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = ZooTask.loss(self, model, batch)
        self.calls += model.training
        if model.training and self.calls > 5:
            self.told.value = float(loss)
        return loss


class ToldByHook(ZooTask):
    """Tells the optimiser the size of the outputs, by a hook that nothing but the model holds."""

    def tell(self, told: Told, output: Tensor) -> None:
        told.value = float(output.detach().pow(2).mean())

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        told, tell = Told(model.parameters(), lr=0.1), type(self).tell
        model.register_forward_hook(lambda module, args, output: tell(self, told, output) if module.training else None)
        return told


class ToldByCount(ToldByHook):
    """Lets the optimiser step less far with each call of the model."""

    def tell(self, told: Told, output: Tensor) -> None:
        told.value *= 0.9


_STATE_OF_LOSS = ("state that the loss keeps", "state that began to change later (optimizer.value)")


@pytest.mark.parametrize(
    ("task", "strategy", "kind"),
    [
        (ToldByHook, "zero1", "declared"),
        pytest.param(ToldByLoss, "zero1", "declared", marks=pytest.mark.slow),
        (ToldLate, "fsdp", "declared"),
        # the calls of a comparison during the run, which one rank makes, do not count
        (ToldByCount, "ddp", "exact"),
    ],
)
def test_optimiser_when_the_loss_sets_what_it_holds_then_this_is_state_of_the_loss(
    task: type[ZooTask], strategy: str, kind: str, tmp_path: Path
) -> None:
    feature = Feature(name=task.__name__, group="", title="", task=task, declares=_STATE_OF_LOSS)
    found = run_cell(feature, strategy, "straight", reference_of(feature, tmp_path), tmp_path)
    assert found.kind == kind
