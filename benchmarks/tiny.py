"""The tiny model as a task of dure."""

from typing import Any

import tiny_model
from torch import Tensor, nn
from torch.optim import Optimizer

import dure
from dure.data import TensorData


class Tiny(dure.Task):
    """`tiny_model`, word for word."""

    num_samples: int = 4096

    def build_model(self) -> nn.Module:
        return tiny_model.build_model()

    def train_data(self) -> TensorData:
        return TensorData(*tiny_model.build_data(self.num_samples))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return tiny_model.build_optimizer(model)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return tiny_model.loss(model, batch)
