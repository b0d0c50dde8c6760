"""Gradients that torch's DDP reduces."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

from dure.errors import WorkerFailed
from tests.conformance.cases import TO_ROUNDING, largest_difference, train_case, weights_of
from tests.conformance.zoo.feature import STEPS, Samples, ZooTask


class Factors(nn.Module):
    """Factorisation of a matrix with a bias for each row and each column, whose gradients share memory."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"row": 4, "row_bias": 1, "column": 4, "column_bias": 1}
        self.tables = nn.ModuleDict({name: nn.Embedding(12, size, sparse=True) for name, size in sizes.items()})

    def forward(self, places: Tensor) -> Tensor:
        row, column = places.unbind(1)
        product = (self.tables["row"](row) * self.tables["column"](column)).sum(1)
        rated: Tensor = (
            product + self.tables["row_bias"](row).squeeze(1) + self.tables["column_bias"](column).squeeze(1)
        )
        return rated


class Recommender(ZooTask):
    def __init__(self, *, shared: str = "") -> None:
        super().__init__()
        self.shared = shared

    def build_model(self) -> nn.Module:
        factors = Factors().double()
        row, column = factors.tables["row"], factors.tables["column"]
        if self.shared == "weight":
            column.weight = row.weight
        elif self.shared == "table":
            factors.tables["column"] = row
        elif self.shared == "weight of a dense table":
            column.weight, column.sparse = row.weight, False
        return factors

    def train_data(self) -> Any:
        generator = torch.Generator().manual_seed(2)
        return Samples(torch.randint(12, (22, 2), generator=generator), torch.randn(22, generator=generator).double())

    def eval_data(self) -> Any:
        return None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        places, ratings = batch
        return functional.mse_loss(model(places), ratings)


@pytest.mark.parametrize(
    ("strategy", "shared"), [("ddp", ""), ("zero1", ""), ("ddp", "weight"), ("zero1", "weight"), ("ddp", "table")]
)
def test_sparse_gradients_that_share_memory_or_a_weight_are_exact(strategy: str, shared: str, tmp_path: Path) -> None:
    one, many = (train_case(tmp_path, Recommender(shared=shared), *how, **STEPS) for how in [(), (strategy, 2)])
    assert largest_difference(weights_of(one), weights_of(many)) < TO_ROUNDING


def test_sparse_gradients_are_refused_where_dense_ones_are_added(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"tables\.row gives sparse gradients .* with a layer that gives dense ones"):
        train_case(tmp_path, Recommender(shared="weight of a dense table"), "ddp", 2, **STEPS)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [("ddp", "bf16"), ("zero1", "int8"), ("ddp", "powersgd")],
)
def test_sparse_gradients_are_refused_by_compression(strategy: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=r"tables\.row gives sparse gradients .* cannot be compressed") as caught:
        train_case(tmp_path, Recommender(), strategy, 2, compression=name, **STEPS)
    assert caught.value.exit_code == 2


class Looked(nn.Module):
    """A table that is looked up by a function, and by a layer with `sparse=True`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(12, 3).double())
        self.layer = nn.Embedding(12, 3, sparse=True).double()

    def forward(self, places: Tensor) -> Tensor:
        by_function = functional.embedding(places, self.table, sparse=True)
        return (by_function * self.layer(places)).sum((1, 2))


class SparseByFunction(Recommender):
    def build_model(self) -> nn.Module:
        return Looked()


class PenalisedTable(Recommender):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) + 0.1 * sum(weight.square().sum() for weight in model.parameters())


@pytest.mark.parametrize(
    ("task", "strategy", "said"),
    [
        (SparseByFunction, "ddp", "table gets sparse gradients, and from no layer"),
        (PenalisedTable, "ddp", r"tables\.row\.weight, .* is of a layer with sparse gradients .* dense ones"),
        (
            PenalisedTable,
            "zero1",
            r"tables\.row\.weight, .* is of a layer with sparse gradients .* dense ones",
        ),
    ],
)
def test_sparse_gradients_that_only_the_loss_shows_are_refused(
    task: type[Recommender], strategy: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(WorkerFailed, match=said) as caught:
        train_case(tmp_path, task(), strategy, 2, **STEPS)
    assert caught.value.exit_code == 2
