"""Features: schedules that act on gradients and on the optimiser, and parameters that share memory."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Adam, Optimizer

from tests.conformance.zoo.feature import HIDDEN, IN, OUT, ZooTask, feature


@feature("Later", "gradients that a schedule clips")
class ClippingSchedule(ZooTask):
    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

        def schedule(samples_seen: int) -> float:
            gradients = [p.grad for p in parameters if p.grad is not None]
            if gradients:
                nn.utils.clip_grad_norm_(parameters, 0.05)
            return 1.0

        return schedule


@feature("Later", "momentum that a schedule forgets in the second epoch")
class ForgettingSchedule(ZooTask):
    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        def schedule(samples_seen: int) -> float:
            if 25 <= samples_seen < 33:
                optimizer.state.clear()
            return 1.0

        return schedule


@feature("State", "a loss that uses the optimiser's second moments")
class UsesSecondMoments(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        self.optimizer = Adam(model.parameters(), lr=0.02)
        return self.optimizer

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        for parameter in model.parameters():
            state = self.optimizer.state.get(parameter, {})
            if "exp_avg_sq" in state:
                loss = loss + 0.1 * (state["exp_avg_sq"].sqrt() * parameter.square()).sum()
        return loss


class TiedByMemory(nn.Module):
    """Encoder and decoder, whose weights are two parameters with one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(IN, HIDDEN).double(), nn.Linear(HIDDEN, IN).double()
        self.out = nn.Linear(IN, OUT).double()
        self.decoder.weight.data = self.encoder.weight.data.t()

    def forward(self, x: Tensor) -> Any:
        return self.out(functional.tanh(self.decoder(functional.tanh(self.encoder(x)))))


@feature("Weights", "two parameters that share their memory (`p.data = q.data.t()`)")
class TiesByMemory(ZooTask):
    def build_model(self) -> nn.Module:
        return TiedByMemory()


@feature("Weights", "a loss that uses `parameter.data`, kept by the task")
class KeepsMemory(ZooTask):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        self.weight = next(model.parameters()).data
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) * (1 + self.weight.norm())


@feature("Weights", "a NumPy array of which a weight was made, and which the loss uses")
class KeepsArray(ZooTask):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        self.array = model[0].weight.detach().numpy().copy()
        model[0].weight = nn.Parameter(torch.from_numpy(self.array))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) * (1 + float(abs(self.array).mean()))
