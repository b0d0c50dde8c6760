"""The models of the benchmarks as a task of dure."""

from typing import Any

import step_models
import tiny_model
from torch import Tensor, nn
from torch.optim import Optimizer

import dure
from dure.data import TensorData


class Tiny(dure.Task):
    """`tiny_model`, or another of `step_models`, word for word."""

    num_samples: int = 4096
    model: str = "tiny"

    def build_model(self) -> nn.Module:
        return step_models.build_model(self.model)

    def train_data(self) -> TensorData:
        return TensorData(*tiny_model.build_data(self.num_samples))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return (tiny_model if self.model == "tiny" else step_models).build_optimizer(model)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return tiny_model.loss(model, batch)
