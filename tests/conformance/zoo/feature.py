"""The register of features: each one a small float64 task with one trait that a strategy may stumble over."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset

import dure

IN, HIDDEN, OUT = 6, 8, 3
NUM_SAMPLES = 22
STEPS: dict[str, Any] = {"global_batch_size": 5, "samples": 49, "seed": 3}
"""Unequal shares on two ranks, a short last batch of two samples, and eleven steps over more than two epochs."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One row of the table."""

    name: str
    group: str
    title: str
    """The trait in a user's words, for the generated page."""
    task: Callable[[], dure.Task]
    declares: tuple[str, ...] = ()
    """Words of which a declaration about this trait contains one; empty: no strategy may change the result."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the run beside `STEPS`."""
    needs: str = ""
    """The library without which the row is skipped."""
    tolerance: float = 1e-10
    """Largest difference of a weight that is rounding: float64 sums in another order."""


FEATURES: dict[str, Feature] = {}
"""All rows, in the order of the page."""


def feature(
    group: str,
    title: str,
    *,
    declares: tuple[str, ...] = (),
    needs: str = "",
    tolerance: float = 1e-10,
    **settings: Any,
) -> Callable[[type[dure.Task]], type[dure.Task]]:
    """Register a task class as a row, under its own name."""

    def register(cls: type[dure.Task]) -> type[dure.Task]:
        if cls.__name__ in FEATURES:
            raise ValueError(f"there are two features of the name {cls.__name__}")
        FEATURES[cls.__name__] = Feature(
            name=cls.__name__,
            group=group,
            title=title,
            task=cls,
            declares=declares,
            settings=settings,
            needs=needs,
            tolerance=tolerance,
        )
        return cls

    return register


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Rows of two tensors, one sample at a time."""

    def __init__(self, *columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Any:
        return tuple(column[index] for column in self.columns)


def chain() -> nn.Sequential:
    """Build four linear layers that can be cut between any two."""
    return nn.Sequential(
        nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(),
        nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUT),
    ).double()  # fmt: skip


def data(num_samples: int = NUM_SAMPLES, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return inputs `(N, IN)` and targets `(N, OUT)`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, IN, generator=generator, dtype=torch.float64)
    y = torch.sin(2 * x[:, :OUT] + x[:, OUT:])
    return x, y


class ZooTask(dure.Task):
    """The plain task that every feature changes in one respect."""

    def build_model(self) -> nn.Module:
        return chain()

    def train_data(self) -> Any:
        return Samples(*data())

    def eval_data(self) -> Any:
        return Samples(*data(7, seed=2))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return functional.mse_loss(model(x), y)
