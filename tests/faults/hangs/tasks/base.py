"""Base of the tasks here: they stop getting on in their fourth step, or are only slow in it."""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dure


class Fits(dure.Task):
    """A line through points."""

    is_slow: bool = False

    def build_model(self):
        return nn.Linear(3, 1)

    def train_data(self):
        return TensorDataset(torch.ones(64, 3), torch.ones(64, 1))

    def eval_data(self):
        return TensorDataset(torch.ones(16, 3), torch.ones(16, 1))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), 0.01)

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    @property
    def seconds(self):
        return 5 if self.is_slow else 1000

    def is_time(self, name, number=12, rank=1):
        """Count a call, and return whether it has that number among those of its name, on that rank."""
        self.calls = getattr(self, "calls", {})
        self.calls[name] = self.calls.get(name, 0) + 1
        return self.calls[name] == number and os.environ["RANK"] == str(rank)
