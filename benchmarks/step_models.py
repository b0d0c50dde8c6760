"""Three models that stress a reducer in three ways: few small tensors, many tensors, many bytes. Knows no dure."""

import tiny_model
import torch
from torch import Tensor, nn
from torch.nn import functional

NAMES = ("tiny", "deep", "wide")

BATCHES = {"tiny": tiny_model.BATCH, "deep": 64, "wide": 16}
"""Samples per step and process."""


def build_model(name: str) -> nn.Module:
    """Build `tiny` (6 tensors, 26,000 parameters), `deep` (102 tensors, 3.3 million) or `wide` (6 million in 6)."""
    if name == "tiny":
        return tiny_model.build_model()
    width, depth = (256, 49) if name == "deep" else (2368, 1)
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *hidden, nn.Linear(width, 10))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Build SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)
