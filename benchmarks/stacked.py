"""A model of any number of megabytes, with AdamW: what a checkpoint has to hold is three times its weights."""

from collections.abc import Callable

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
    saved_to: str = ""
    """File to which `torch.save` writes the state every `samples_between` samples; empty for none."""
    samples_between: int = 1024

    def build_model(self) -> nn.Module:
        num_layers = round(self.megabytes * 1e6 / (3 * 4 * WIDTH * (WIDTH + 1)))
        layers = [layer for _ in range(num_layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        self.model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
        return self.model

    def train_data(self) -> TensorData:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.num_samples, WIDTH, generator=generator)
        return TensorData(inputs, torch.arange(self.num_samples) % 10)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-4)

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Callable[[int], float]:
        def factor(samples_seen: int) -> float:
            if self.saved_to and samples_seen and samples_seen % self.samples_between == 0:
                torch.save({"model": self.model.state_dict(), "optimizer": optimizer.state_dict()}, self.saved_to)
            return 1.0

        return factor

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return functional.cross_entropy(model(inputs), labels)
