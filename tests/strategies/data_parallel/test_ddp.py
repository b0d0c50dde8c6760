"""Gradients that torch's DDP reduces."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

from dure.errors import SpecInvalid, WorkerFailed
from dure.strategies.data_parallel.ddp import ObjectiveModule
from tests.conformance.cases import TO_ROUNDING, are_same_bits, largest_difference, train_case, weights_of
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
    ("strategy", "shared"),
    [
        ("zero1", ""),
        ("ddp", "weight"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("ddp", ""), ("zero1", "weight"), ("ddp", "table")]),
    ],
)
def test_sparse_gradients_that_share_memory_or_a_weight_are_exact(strategy: str, shared: str, tmp_path: Path) -> None:
    one, many = (train_case(tmp_path, Recommender(shared=shared), *how, **STEPS) for how in [(), (strategy, 2)])
    assert largest_difference(weights_of(one), weights_of(many)) < TO_ROUNDING


@pytest.mark.parametrize(("strategy", "nproc"), [("single", 1), ("ddp", 2)])
def test_sparse_gradients_are_refused_where_the_norm_of_all_is_needed(
    strategy: str, nproc: int, tmp_path: Path
) -> None:
    with pytest.raises(WorkerFailed, match=r"torch computes none of sparse ones \(tables\.row") as caught:
        train_case(tmp_path, Recommender(), strategy, nproc, **{**STEPS, "clip_norm": 1.0})
    assert caught.value.exit_code == 2


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


class Branches(nn.Module):
    """Layers of which one is called twice, in reentrant checkpoints, one never, and one in some steps only."""

    def __init__(self, *, begins_whole: bool | None) -> None:
        super().__init__()
        self.twice, self.unused, self.seldom = (nn.Linear(4, 4) for _ in range(3))
        self.begins_whole = begins_whole
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += self.training
        for _ in range(2):
            x = torch.tanh(checkpoint(self.twice, x, use_reentrant=True))
        is_late = self.num_calls > 4
        return x if self.begins_whole is None or self.begins_whole == is_late else self.seldom(x)


class Branching(ZooTask):
    begins_whole: bool | None = None

    def build_model(self) -> nn.Module:
        return Branches(begins_whole=self.begins_whole).double()

    def train_data(self) -> Any:
        generator = torch.Generator().manual_seed(2)
        return Samples(torch.randn(22, 4, generator=generator).double().requires_grad_())

    def eval_data(self) -> Any:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0].requires_grad_()).square().mean()


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_static_graph_allows_unused_layers_and_reentrant_checkpoints(strategy: str, tmp_path: Path) -> None:
    one = train_case(tmp_path, Branching(), **STEPS)
    many = train_case(tmp_path, Branching(), strategy, 2, static_graph=True, **STEPS)
    assert largest_difference(weights_of(one), weights_of(many)) < TO_ROUNDING


@pytest.mark.parametrize(
    ("begins_whole", "options", "match"),
    [
        (None, {}, "more than once in a backward pass"),
        (True, {"static_graph": True}, "got no gradient from a rank's last microbatch.*, and no static_graph"),
        (False, {"static_graph": True}, "uses other parameters than the first one"),
    ],
    ids=["not static", "loses a layer", "gets a layer"],
)
def test_graph_that_is_not_as_it_was_told_is_refused(
    begins_whole: bool | None, options: dict[str, Any], match: str, tmp_path: Path
) -> None:
    with pytest.raises(WorkerFailed, match=match) as caught:
        train_case(tmp_path, Branching(begins_whole=begins_whole), "ddp", 2, **options, **STEPS)
    assert caught.value.exit_code == 2


def test_static_graph_refuses_a_step_in_microbatches(tmp_path: Path) -> None:
    with pytest.raises(SpecInvalid, match="static_graph does not go with several microbatches"):
        train_case(tmp_path, Branching(), "ddp", 2, static_graph=True, microbatch_size=1, **STEPS)
    with pytest.raises(SpecInvalid, match="static_graph finds the unused parameters in the first step"):
        train_case(tmp_path, Branching(), "ddp", 2, static_graph=True, find_unused_parameters=True, **STEPS)


class Counting(nn.Module):
    """Layer with a table that every forward sets by its samples, and reads in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * (1 + self.last)
        with torch.no_grad():
            self.last.copy_(x.mean())
        return y


class LearnedTable(Branching):
    def build_model(self) -> nn.Module:
        return Counting().double()


def test_buffers_stay_with_their_ranks_unless_they_are_sent(tmp_path: Path) -> None:
    sent, own = (
        train_case(tmp_path, LearnedTable(), "ddp", 2, broadcast_buffers=value, **STEPS) for value in (True, False)
    )
    assert largest_difference(weights_of(sent), weights_of(own)) > TO_ROUNDING
    told = [" ".join(json.loads((run / "summary.json").read_text())["not_preserved"]) for run in (sent, own)]
    assert ["broadcast_buffers is off" in words for words in told] == [False, True]


@pytest.mark.parametrize(
    ("strategy", "compression"),
    [
        ("ddp", "int8"),
        ("ring_ddp", "bf16"),
        pytest.param("ddp", "bf16", marks=pytest.mark.slow),
        pytest.param("ring_ddp", "int8", marks=pytest.mark.slow),
    ],
)
def test_compression_without_its_error_computes_the_same(strategy: str, compression: str, tmp_path: Path) -> None:
    with_error, without = (
        train_case(tmp_path, LearnedTable(), strategy, 2, compression=compression, compression_error=value, **STEPS)
        for value in (True, False)
    )
    assert are_same_bits(weights_of(with_error), weights_of(without))
    measured, others = (
        {*json.loads((run / "rank0.jsonl").read_text().splitlines()[-1])["measured"]} for run in (with_error, without)
    )
    assert measured - others == {"compression_error"}


def test_rehearsal_of_complex_weights_gives_each_a_gradient_without_a_warning():
    model = nn.ParameterList([torch.ones(2, dtype=torch.complex64), torch.ones(2)])
    module = ObjectiveModule(SimpleNamespace(device=torch.device("cpu"), finds_unused=False), model)
    root, _ = module(None, 1)  # pytest makes errors of warnings
    root.backward()
    assert [p.grad.tolist() for p in model] == [[0j, 0j], [0.0, 0.0]]
