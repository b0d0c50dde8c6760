"""Runs whose loss changes its behaviour on the way: that is declared, or refused before training."""

import json
from contextlib import nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from dure.errors import WorkerFailed
from tests.conformance.cases import train_case, weights_of
from tests.conformance.zoo.feature import STEPS, ZooTask, chain


class Phased(ZooTask):
    """Begins a phase in the second epoch and ends it before the next checkpoint."""

    end = 40

    def build_model(self) -> nn.Module:
        self.is_on = False
        return chain()

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        def schedule(samples_seen: int) -> float:
            self.is_on = 25 <= samples_seen < self.end
            return 1.0

        return schedule


class Variance(Phased):
    """Has a term for the variance over the batch in its phase."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        output = model(x)
        loss = functional.mse_loss(output, y)
        return loss + 0.1 * output.var(0, correction=0).sum() if self.is_on else loss


class Decay(Phased):
    """Scales the weights down in the loss."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if self.is_on and model.training:
            for parameter in model.parameters():
                parameter.data.mul_(0.98)
        return super().loss(model, batch)


class ReadsGradients(Phased):
    """Has another loss where there are gradients already."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        weight = next(model.parameters())
        is_half = self.is_on and model.training and weight.grad is not None
        return super().loss(model, batch) * (0.5 if is_half else 1.0)


class Observer(nn.Module):
    """Follows the largest value while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones((), dtype=torch.float64))
        self.is_on = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_on and self.training:
            self.largest.lerp_(x.detach().abs().max(), 0.2)
        return x * self.largest


class Observes(Phased):
    """Switches an observer on."""

    def build_model(self) -> nn.Module:
        self.observer, model = Observer(), chain()
        model.insert(2, self.observer)
        return model

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        def schedule(samples_seen: int) -> float:
            self.observer.is_on = 25 <= samples_seen < 40
            return 1.0

        return schedule


def with_normalised_gradient(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean square, with a gradient that is divided by its norm over the batch."""
    gradient = (output - target).detach()
    gradient = 0.1 * gradient / (1e-9 + gradient.norm())
    surrogate = (output * gradient).sum()
    return surrogate - surrogate.detach() + functional.mse_loss(output.detach(), target)


class Normalised(Phased):
    """Keeps the value of its loss, and normalises the gradient over the batch."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return with_normalised_gradient(model(x), y) if self.is_on else functional.mse_loss(model(x), y)


class NormalisedByCount(Normalised):
    """Does so after more calls than are made before training, announced by no schedule."""

    def build_model(self) -> nn.Module:
        self.calls = 0
        return super().build_model()

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.calls += model.training
        self.is_on = self.calls > 14
        return super().loss(model, batch)


SCALE: ContextVar[float] = ContextVar("scale", default=1.0)


class ScaledByContext(nn.Module):
    """Scales by a context variable."""

    def forward(self, x: Tensor) -> Tensor:
        return x * SCALE.get()


class SetsContext(Phased):
    """Sets a context variable around the model's call."""

    end = 60

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.insert(4, ScaledByContext())
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        token = SCALE.set(0.5 if self.is_on else 1.0)
        try:
            return super().loss(model, batch)
        finally:
            SCALE.reset(token)


class Halving(TorchFunctionMode):
    """Halves what `tanh` returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 0.5 * result if func in (torch.tanh, Tensor.tanh) else result


class EntersMode(Phased):
    """Enters a mode for functions around the model's call."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        with Halving() if self.is_on else nullcontext():
            output = model(x)
        return functional.mse_loss(output, y)


class RoundsSaved(Phased):
    """Rounds what is kept for the backward pass."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        rounding = saved_tensors_hooks(lambda saved: (saved * 4).round() / 4, lambda saved: saved)
        with rounding if self.is_on else nullcontext():
            output = model(x)
        return functional.mse_loss(output, y)


IN_TWO = {"microbatch_size": 2}
LONGER = {"samples": 100}


@pytest.mark.parametrize(
    ("task", "strategy", "settings", "said"),
    [
        (Variance, "ddp", {}, "(with the state that the schedule sets at 27 samples)"),
        (Variance, "fsdp", {}, "(with the state that the schedule sets at 27 samples)"),
        (Decay, "ddp", IN_TWO, "parameters that the loss writes to"),
        (Observes, "ddp", {}, "buffers learned in forward (2.largest)"),
        (Normalised, "zero1", {}, "the gradient of"),
        (NormalisedByCount, "ddp", LONGER, "the gradient of"),
        (NormalisedByCount, "zero1", LONGER, "the gradient of"),
    ],
)
def test_loss_when_it_differs_in_a_phase_then_that_is_declared(
    task: type[ZooTask], strategy: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    run = train_case(tmp_path, task(), strategy, 2, **{**STEPS, **settings})
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert any(said in text for text in declared), declared


@pytest.mark.parametrize(
    ("task", "strategy", "settings", "said"),
    [
        (Decay, "fsdp", {}, "writes to parameters"),
        (EntersMode, "pipeline", {}, "with the state that the schedule sets at 27 samples, Sequential cut before"),
        (RoundsSaved, "pipeline", {}, "gives another gradient"),
        (EntersMode, "rpc_model", {}, "with the state that the schedule sets at 27 samples, Sequential cut before"),
        (SetsContext, "rpc_model", {}, "with the state that the schedule sets at 27 samples, Sequential cut before"),
        (ReadsGradients, "ddp", IN_TWO, "reads or changes the parameters' gradients"),
    ],
)
def test_loss_when_it_cannot_be_divided_in_a_phase_then_the_run_is_refused(
    task: type[ZooTask], strategy: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(WorkerFailed, match=said):
        train_case(tmp_path, task(), strategy, 2, **{**STEPS, **settings})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "strategy"), [(EntersMode, "dp"), (RoundsSaved, "dp"), (SetsContext, "dp"), (SetsContext, "pipeline")]
)
def test_loss_when_it_enters_contexts_in_a_phase_then_weights_are_those_of_one_device(
    task: type[ZooTask], strategy: str, tmp_path: Path
) -> None:
    alone, divided = (
        weights_of(train_case(tmp_path, task(), name, n, **STEPS)) for name, n in (("single", 1), (strategy, 2))
    )
    for name, value in alone.items():
        torch.testing.assert_close(divided[name], value, rtol=0, atol=1e-10)  # rounding in float64
