"""Snapshots in memory beside checkpoints: whatever a task does to its state, both hold the same after every step."""

import math
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from dure.cluster.rank import RankInfo
from dure.comm.groups import Solo
from dure.process.context import Place
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.precision import Precision
from dure.strategies.table import STRATEGIES, load_strategy
from dure.training.checkpoints.rank_shard import shard_of
from dure.training.checkpoints.reader import checkpoint_of
from dure.training.checkpoints.state import Position
from dure.training.run_state.capture import Progression, captured
from dure.training.run_state.live_share import LiveShare
from dure.training.run_state.snapshot_policy import MemorySaver
from dure.training.task.identity import TaskIdentity
from tests.specs import spec_of

WIDTH = 4


class Net(nn.Module):
    """Two square layers, the second with statistics; `change` is what a task does to it by itself in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)))

    def change(self, step: int) -> None:
        pass


class Counting(Net):
    """Plain extra state."""

    steps = 0

    def change(self, step: int) -> None:
        self.steps = step

    def get_extra_state(self) -> Any:
        return {"steps": self.steps, "names": ["a"] * self.steps}

    def set_extra_state(self, state: Any) -> None:
        self.steps = state["steps"]


class Remembering(Net):
    """Extra state that is a tensor, another one in each step."""

    def change(self, step: int) -> None:
        self.memory = torch.full((2,), float(step))

    def get_extra_state(self) -> Any:
        return getattr(self, "memory", torch.zeros(2))

    def set_extra_state(self, state: Any) -> None:
        self.memory = state


class Growing(Net):
    def change(self, step: int) -> None:
        self.seen = torch.arange(float(step))


class Resized(Net):
    def change(self, step: int) -> None:
        self.seen.resize_(step + 1).fill_(step)


class Shrinking(Net):
    """The same memory under another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.arange(12.0))

    def change(self, step: int) -> None:
        self.seen.resize_(12 - step)


class Swapped(Net):
    """Parameters whose data are exchanged, as a moving average by hand does."""

    def change(self, step: int) -> None:
        self.first.weight.data = self.first.weight.data * 0.9 + step


class Transposed(Net):
    """The same memory and shape in another order."""

    def change(self, step: int) -> None:
        self.first.weight.data = self.first.weight.data.t()


class Untied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second.weight = self.first.weight

    def change(self, step: int) -> None:
        if step == 2:
            self.second.weight = nn.Parameter(self.first.weight.detach() + 1)


class Replaced(Net):
    """A module instead of another one."""

    def change(self, step: int) -> None:
        if step == 2:
            self.norm = nn.BatchNorm1d(WIDTH)


class Hooked(Net):
    """A hook that adds to the model's state."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self._register_state_dict_hook(self.add)

    @staticmethod
    def add(module: "Hooked", state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state["number"] = module.number

    def change(self, step: int) -> None:
        self.number = step


class Persisted(Net):
    """A buffer that is kept from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("late", torch.ones(1), persistent=False)

    def change(self, step: int) -> None:
        if step == 2:
            self._non_persistent_buffers_set.discard("late")


class Plain(SGD):
    """Plain values of all kinds in the state of each parameter."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                state = self.state[p]
                steps = state.get("steps", 0) + 1
                state.update(steps=steps, name=f"p{number}", nothing=None, pair=(steps, 0.5), sizes=[1] * steps)
                state["nested"] = {"deep": {3: steps, "tensor": p.detach().sum()}}
        return loss


class Counted(SGD):
    """Plain numbers in the state of each parameter, which the last one gets first; one becomes a tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.steps += 1
        for number, p in reversed([*enumerate(self.param_groups[0]["params"])]):
            state = self.state[p]
            state["steps"] = 1000 * number + self.steps
            state["mean"] = state.get("mean", torch.zeros(2)).add_(number)
            state["best"] = math.nan if self.steps % 2 else number / 7
            if number % 2:
                del state["mean"]
            if number == 2 and self.steps > 3:
                state["best"] = torch.ones(1)
        return loss


class Other(SGD):
    """A key beside `state` and `param_groups`."""

    steps, mean = 0, torch.zeros(())

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        self.mean = torch.full((), float(self.steps))
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "clock": {"steps": self.steps, "mean": self.mean}}


class Shared(SGD):
    """State of the whole beside that of the parameters."""

    def step(self, closure: Any = None) -> Any:
        self.state["rounds"] = self.state.get("rounds", 0) + 1
        return super().step(closure)


class Renewed(Optimizer):
    """Momentum that is another tensor in each step, and memory that one parameter gets later than the others."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["rounds"] = group.get("rounds", 0) + 1
            for number, p in enumerate(group["params"]):
                state = self.state[p]
                state["mean"] = 0.9 * state.get("mean", torch.zeros_like(p)) + p.grad
                if number == 0 and group["rounds"] > 2:
                    state.setdefault("late", torch.zeros(2)).add_(1)
                p -= group["lr"] * state["mean"]


class TensorRate(AdamW):
    """A learning rate that is a tensor, changed in place and in odd steps replaced."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=torch.tensor(0.1))
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["lr"].mul_(0.9)
            if self.steps % 2:
                group["lr"] = group["lr"].clone()
        return super().step(closure)


class Scheduled(SGD):
    """A learning rate that changes, and an option of the group that comes later."""

    def step(self, closure: Any = None) -> Any:
        for number, group in enumerate(self.param_groups, 1):
            group["lr"] *= 0.5
            if group["lr"] < 0.03:
                group["late"] = [number, True]
        return super().step(closure)


def momentum(kind: type[Optimizer] = SGD) -> Any:
    return lambda model: kind(model.parameters(), lr=0.1, momentum=0.9)  # type: ignore[call-arg]


CASES = {
    "usual": (Net, lambda model: AdamW(model.parameters())),
    "plain extra state": (Counting, momentum()),
    "a tensor as extra state": (Remembering, momentum()),
    "a buffer that grows": (Growing, momentum()),
    "a buffer resized": (Resized, momentum()),
    "a buffer resized within its memory": (Shrinking, momentum()),
    "exchanged data": (Swapped, momentum()),
    "transposed data": (Transposed, momentum()),
    "untied weights": (Untied, lambda model: SGD([*model.norm.parameters()], lr=0.1, momentum=0.9)),
    "a module replaced": (Replaced, lambda model: SGD(model.first.parameters(), lr=0.1)),
    "a hook": (Hooked, momentum()),
    "a buffer kept later": (Persisted, momentum()),
    "plain optimiser state": (Net, momentum(Plain)),
    "plain numbers for each parameter": (Net, lambda model: Counted(model.parameters(), lr=0.1)),
    "a key of the optimiser's own": (Net, momentum(Other)),
    "state of the whole": (Net, momentum(Shared)),
    "new tensors in each step": (Net, lambda model: Renewed(model.parameters())),
    "a tensor as learning rate": (Net, lambda model: TensorRate(model.parameters())),
    "a schedule": (Net, momentum(Scheduled)),
}


@pytest.fixture
def descriptor() -> Iterator[int]:
    memory = os.memfd_create("snapshots")
    yield memory
    os.close(memory)


def session_of(model: nn.Module, build_optimizer: Any) -> Any:
    cpu = torch.device("cpu")
    strategy = load_strategy("single")(
        StrategyContext(STRATEGIES["single"], Solo(), [cpu], Precision("fp32", "cpu"), spec_of("single"))
    )
    strategy.prepare(model, build_optimizer, lambda model, batch: model(batch).square().mean())
    place = Place(rank=RankInfo(), threads=1, is_supervised=True)
    return SimpleNamespace(
        strategy=strategy,
        group=Solo(),
        place=place,
        order=SimpleNamespace(epoch_samples=8),
        reseeding_note="",
        kept=SimpleNamespace(tensors=lambda **_: {}, restore=lambda tensors: None),
        identity=TaskIdentity(),
        notes=[],
    )


def contents(checkpoint: Any) -> dict[str, Any]:
    """Return all that a checkpoint holds but for the random generators."""
    return {
        "weights": checkpoint.weights(),
        "aliases": checkpoint.manifest.aliases,
        "optimizer": checkpoint.optimizer,
        "extra": checkpoint.extra,
        "model_extra": checkpoint._state["model_extra"],
    }


def assert_same(one: Any, other: Any, where: str = "") -> None:
    assert type(one) is type(other), where
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_same(mine, theirs, f"{where}.{number}")
    else:
        assert one == other or (one != one and other != other), where


@pytest.mark.parametrize("case", CASES)
def test_snapshot_when_the_state_changes_in_any_way_holds_what_a_checkpoint_would(case, descriptor):
    build_model, build_optimizer = CASES[case]
    torch.manual_seed(0)
    session, progression = session_of(build_model(), build_optimizer), Progression()
    model, optimizer = session.strategy.model, session.strategy.optimizer
    saver = MemorySaver(session, progression, [descriptor], 1, warn=pytest.fail)
    for step in range(1, 6):
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
        model.change(step)
        progression.step, progression.samples_seen, progression.loss_sum = step, 8 * step, 0.1 * step
        assert saver.is_due()
        saver.take(lambda: None)
        position = Position(samples_seen=8 * step, step=step, epoch=step)
        expected = checkpoint_of([shard_of(captured(session, progression), 0)], position, 0)
        assert_same(contents(saver._read(position)), contents(expected))


@pytest.mark.parametrize(
    ("build_optimizer", "expected"),
    [
        # momentum comes with the first step, and the option of the schedule in the second
        pytest.param(momentum(Scheduled), [0, 1, 2], id="learning rates"),
        # state comes with the first step; from the fourth on a number is a tensor, another one in each step
        pytest.param(lambda model: Counted(model.parameters(), lr=0.1), [0, 1, 4, 5], id="numbers of parameters"),
    ],
)
def test_share_when_only_plain_numbers_change_is_not_built_again(build_optimizer, expected, monkeypatch):
    session, progression = session_of(Net(), build_optimizer), Progression()
    model, optimizer = session.strategy.model, session.strategy.optimizer
    built: list[int] = []
    build = LiveShare._build
    monkeypatch.setattr(LiveShare, "_build", lambda self, *args: (built.append(progression.step), build(self, *args)))
    share = LiveShare(session, progression, is_whole=False)
    for step in range(1, 6):
        model(torch.randn(8, WIDTH)).sum().backward()
        optimizer.step()
        progression.step = step
        share.update()
    assert built == expected
