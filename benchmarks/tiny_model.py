"""A model so small that what is around it shows: two hidden layers on 64 numbers, data in tensors. Knows no dure."""

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH = 64
"""Samples per step and process."""
LEARNING_RATE = 0.01


def build_model() -> nn.Module:
    """Build 64 - 128 - 128 - 10."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Build SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def build_data(num_samples: int) -> tuple[Tensor, Tensor]:
    """Make inputs `(N, 64)` and labels `(N,)`."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_samples, 64, generator=generator)
    return inputs, torch.randint(10, (num_samples,), generator=generator)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)
