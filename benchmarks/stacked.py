"""A model of any number of megabytes, with AdamW: what a checkpoint has to hold is three times its weights."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

import dure
from dure.data import TensorData

WIDTH = 512


class Stacked(dure.Task):
    megabytes: int = 100
    """Megabytes of weights and the optimiser's state together."""
    num_samples: int = 1024

    def build_model(self) -> nn.Module:
        num_layers = round(self.megabytes * 1e6 / (3 * 4 * WIDTH * (WIDTH + 1)))
        layers = [layer for _ in range(num_layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        return nn.Sequential(*layers, nn.Linear(WIDTH, 10))

    def train_data(self) -> TensorData:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.num_samples, WIDTH, generator=generator)
        return TensorData(inputs, torch.arange(self.num_samples) % 10)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-4)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels)
