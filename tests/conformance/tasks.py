"""Small float64 tasks whose runs the battery compares; each says in its options what is to differ."""

import hashlib
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Dataset, Subset

import dure
from dure.data import TensorData
from dure.data.randomness import sample_uniform

TOKENS, WIDTH = 5, 6


class Model(nn.Module):
    """A frozen layer, a tied weight, a parameter of one number: what a strategy must carry along."""

    def __init__(self, dtype: torch.dtype, dropout: float) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH, dtype=dtype).requires_grad_(False)
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.outer = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.outer.weight = self.inner.weight
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.inner(self.frozen(x))))
        return self.scale * self.outer(hidden)


def layered_model(dtype: torch.dtype, dropout: float) -> nn.Sequential:
    """Build four linear layers, none tied or frozen, that can be cut between any two."""
    return nn.Sequential(
        nn.Linear(WIDTH, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, 8, dtype=dtype), nn.Dropout(dropout), nn.Tanh(),
        nn.Linear(8, 8, dtype=dtype), nn.Tanh(), nn.Linear(8, WIDTH, dtype=dtype),
    )  # fmt: skip


def digests_of(model: nn.Module) -> dict[str, str]:
    """Return a digest of every tensor of a model, of the whole tensor where ranks hold shards."""
    state = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in model.state_dict().items()}
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in state.items()}


class Regression(dure.Task):
    """Learns a fixed map of random vectors; with `tokens`, rows count by their uneven masks."""

    kind: Literal["mean", "tokens"] = "mean"
    optimizer: Literal["sgd", "adamw"] = "sgd"
    num_samples: int = 44
    dtype: str = "float64"
    dropout: float = 0.0
    layered: bool = False
    digests: str = ""
    """A folder in which every rank leaves digests of the weights that it evaluates, once they are trained."""

    def _data(self, num_samples: int, seed: int) -> TensorData:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_samples, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
        y = torch.sin(2 * x.roll(1, 2)) + 0.1 * torch.randn(x.shape, generator=generator, dtype=torch.float64)
        # every third sample has a single token, so that shares of equal size differ much in tokens
        lengths = torch.randint(1, TOKENS + 1, (num_samples,), generator=generator)
        lengths[::3] = 1
        mask = torch.arange(TOKENS) < lengths[:, None]
        dtype = getattr(torch, self.dtype)
        return TensorData(x.to(dtype), y.to(dtype), mask)

    def build_model(self) -> nn.Module:
        model = (layered_model if self.layered else Model)(getattr(torch, self.dtype), self.dropout)
        if self.digests:
            self.untrained = digests_of(model)
        return model

    def train_data(self) -> TensorData:
        return self._data(self.num_samples, 1)

    def eval_data(self) -> TensorData:
        return self._data(23, 2)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        if self.optimizer == "adamw":
            return AdamW(model.parameters(), lr=0.01)
        return SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Callable[[int], float]:
        return lambda samples: 1 - 0.9 * samples / total_samples

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor | dure.Sum:
        x, y, mask = batch
        error = functional.mse_loss(model(x), y, reduction="none").mean(2)  # (B, T)
        if self.kind == "mean":
            return error.mean()
        return dure.Sum((error * mask).sum(), mask.sum())

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, dure.Sum]:
        x, y, mask = batch
        if self.digests:
            digests = digests_of(model)
            if digests.items() - self.untrained.items():
                with (Path(self.digests) / f"rank{os.environ.get('RANK', 0)}").open("a") as file:
                    file.write(json.dumps(digests) + "\n")
        error = (model(x) - y).abs().mean(2)
        return {"absolute_error": dure.Sum((error * mask).sum(), mask.sum())}


class Normalised(Regression):
    """The same with BatchNorm over the features, whose statistics a strategy may or may not share."""

    track: bool = True
    momentum: float | None = 0.1

    def build_model(self) -> nn.Module:
        dtype = getattr(torch, self.dtype)
        return nn.Sequential(
            Rows(nn.Linear(WIDTH, WIDTH, dtype=dtype)),
            Rows(nn.BatchNorm1d(WIDTH, dtype=dtype, track_running_stats=self.track, momentum=self.momentum)),
            nn.Tanh(),
            Rows(nn.BatchNorm1d(WIDTH, dtype=dtype, affine=False)),
            Rows(nn.Linear(WIDTH, WIDTH, dtype=dtype)),
        )


class Rows(nn.Module):
    """Runs a module over the tokens of all samples as rows of one batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(0, 1)).view(x.shape)


class Drawing(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Changes each sample by a draw from each of the three global generators."""

    def __init__(self, data: TensorData) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        x, y, mask = self.data[index]
        x = x + random.gauss(0, 0.3) + float(np.random.normal(0, 0.3)) + 0.3 * torch.randn(x.shape, dtype=x.dtype)
        return x, y, mask


def noise_of_the_sample(batch: tuple[Tensor, ...], indices: Sequence[int]) -> tuple[Tensor, ...]:
    """Change a whole batch by draws that belong to its samples."""
    x, *rest = batch
    return (x + sample_uniform(indices, TOKENS)[:, :, None].to(x.dtype), *rest)


class Augmented(Regression):
    """The same with random transforms, written in one of the ways that users write them."""

    way: Literal["one by one", "subset", "batched"] = "one by one"

    def train_data(self) -> Any:
        data = super().train_data()
        if self.way == "batched":
            return TensorData(*data.tensors, transform=noise_of_the_sample)
        # a Subset fetches by batch, and so hides the draws of what it is a subset of
        return Subset(Drawing(data), range(self.num_samples)) if self.way == "subset" else Drawing(data)
