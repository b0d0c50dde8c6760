"""Small tasks that are slow for one reason each, and healthy ones beside them."""

import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import dure


class Samples(Dataset[Any]):
    """Data of which each sample takes a while to load."""

    def __init__(self, num_samples: int, seconds: float) -> None:
        self._num_samples = num_samples
        self._seconds = seconds

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._seconds)
        return torch.full((16,), index / self._num_samples), torch.zeros(1)


HOARD: list[Tensor] = []
"""Memory that a rank keeps besides the model."""


class Job(dure.Task):
    """Regression whose parts take as long as its options say."""

    ballast: int = 0
    """Number of weights that are stored, sent and stepped, but take part in no computation worth the name."""
    loading: float = 0.0
    computing: float = 0.0
    """Seconds of a call of the loss, however large its batch is: as a device that is not full."""
    computing_each: float = 0.0
    """Seconds of a call of the loss for each of its samples."""
    uneven: float = 0.0
    """Seconds by which calls take longer whose first sample begins with more than 0.5."""
    num_layers: int = 0
    """Further layers of 8 units."""
    late_rank: int = -1
    late: float = 0.0
    """Seconds by which one rank's loss takes longer."""
    evaluating: float = 0.0
    hoarded_bytes: int = 0
    """Bytes that the late rank keeps besides the model."""

    def build_model(self) -> nn.Module:
        more = [layer for _ in range(self.num_layers) for layer in (nn.Linear(8, 8), nn.ReLU())]
        inner = [nn.Linear(64, 8), *more, nn.Linear(8, 64)] if more else []
        model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), *inner, nn.Linear(64, 1))
        model.register_parameter("ballast", nn.Parameter(torch.zeros(self.ballast)) if self.ballast else None)
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-6)

    def train_data(self) -> Dataset[Any]:
        if not self.loading:
            return TensorDataset(torch.rand(2_000, 16), torch.zeros(2_000, 1))
        return Samples(2_000, self.loading)

    def eval_data(self) -> Dataset[Any] | None:
        return Samples(64, self.evaluating) if self.evaluating else None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        if model.training:
            is_late = int(os.environ.get("RANK", "-1")) == self.late_rank
            if is_late and self.hoarded_bytes and not HOARD:
                HOARD.append(torch.ones(self.hoarded_bytes, dtype=torch.uint8))
            is_long = bool(inputs[0, 0] > 0.5)
            time.sleep(self.computing + self.computing_each * len(inputs) + self.late * is_late + self.uneven * is_long)
        loss: Tensor = (model(inputs) - targets).square().mean()
        return loss if model.ballast is None else loss + model.ballast[:1].sum()
