"""State of the task that collate changes."""

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dure.training.session.collate_state import CollateChanges, CollateState
from tests.conformance.cases import largest_difference, train_case, weights_of
from tests.conformance.zoo.feature import HIDDEN, OUT, STEPS, Samples, ZooTask, data


class Words:
    """Task that numbers words in the order in which it meets them, counts, draws and makes a mask."""

    def __init__(self) -> None:
        self.vocabulary: dict[int, int] = {}
        self.calls = 0
        self.masks: dict[int, list[int]] = {}
        self.generator = np.random.default_rng(1)

    def numbered(self, words: Any) -> list[int]:
        return [self.vocabulary.setdefault(word, len(self.vocabulary)) for word in words]

    def counted(self, words: Any) -> list[int]:
        self.calls += 1
        return [word * self.calls for word in words]

    def masked(self, words: Any) -> list[int]:
        mask = self.masks.setdefault(len(words), [1] * len(words))
        return [word * each for word, each in zip(words, mask, strict=True)]

    def drawn(self, words: Any) -> list[int]:
        return [word * int(self.generator.integers(100)) for word in words]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("numbered", CollateChanges(learned=("task.vocabulary",))),
        ("counted", CollateChanges(counted=("task.calls",))),
        ("masked", CollateChanges(tables=("task.masks",))),
        ("drawn", CollateChanges()),
    ],
)
def test_state_when_collate_changes_it_then_it_is_told_apart_and_put_back(name: str, expected: CollateChanges) -> None:
    task = Words()
    state = CollateState({"task": task})
    before = repr(vars(task)), task.generator.bit_generator.state
    assert state.changes(getattr(task, name), [[3, 4], [5, 4, 6]]) == expected
    assert (repr(vars(task)), task.generator.bit_generator.state) == before
    assert state.has_drawn == (name == "drawn")


def test_state_when_an_iterator_is_part_of_it_then_nothing_is_put_back() -> None:
    task = Words()
    vars(task)["numbers"] = numbers = defaultdict(itertools.count().__next__)
    with CollateState({"task": task}).undone():
        _ = [numbers[word] for word in (5, 6)]
    assert numbers == {5: 0, 6: 1}


class Tokens(ZooTask):
    """Classifies by two words of which each gets the next free row of a table."""

    def __init__(self) -> None:
        self.vocabulary: dict[int, int] = {}

    def build_model(self) -> nn.Module:
        layers = nn.Embedding(40, HIDDEN), nn.Flatten(), nn.Linear(2 * HIDDEN, HIDDEN), nn.Tanh()
        return nn.Sequential(*layers, nn.Linear(HIDDEN, OUT)).double()

    def eval_data(self) -> None:
        return None

    def collate(self, samples: Any) -> Any:
        words = [[int(3 * value) for value in x[:2]] for x, _ in samples]
        rows = [[self.vocabulary.setdefault(word, len(self.vocabulary)) for word in pair] for pair in words]
        return torch.tensor(rows), torch.stack([y for _, y in samples])


class CountedTokens(Tokens):
    """Numbers words by an iterator."""

    def __init__(self) -> None:
        self.vocabulary = defaultdict(itertools.count().__next__)

    def collate(self, samples: Any) -> Any:
        rows = [[self.vocabulary[int(3 * value)] for value in x[:2]] for x, _ in samples]
        return torch.tensor(rows), torch.stack([y for _, y in samples])


@pytest.mark.parametrize("strategy", ["single", "tensor_parallel"])
def test_run_when_reads_before_it_move_an_iterator_of_collate_then_that_is_declared(
    strategy: str, tmp_path: Path
) -> None:
    run = train_case(tmp_path, CountedTokens(), strategy, 1 if strategy == "single" else 2, **STEPS)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    said = "state that collate keeps: samples that are read before training move task.vocabulary.default_factory"
    assert [text for text in declared if text.startswith(said)]


class Warming(ZooTask):
    """Scales batches by the number of those before."""

    def __init__(self) -> None:
        self.calls = 0

    def eval_data(self) -> None:
        return None

    def collate(self, samples: Any) -> Any:
        x, y = super().collate(samples)
        self.calls += 1
        return x * (1 + 0.1 * self.calls), y


class Masking(Warming):
    """Keeps a mask for each size of a batch."""

    def __init__(self) -> None:
        self.masks: dict[int, Tensor] = {}

    def collate(self, samples: Any) -> Any:
        x, y = ZooTask.collate(self, samples)
        return x * self.masks.setdefault(len(x), torch.ones(len(x), 1, dtype=x.dtype)), y


class Mixing(Warming):
    """Mixes the samples of a batch by a generator of the task's own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(4)

    def collate(self, samples: Any) -> Any:
        x, y = ZooTask.collate(self, samples)
        other = torch.from_numpy(self.generator.permutation(len(x)))
        return x + 0.3 * x[other], y + 0.3 * y[other]


_OF_WORKERS = "data: collate changes {}, of which each loader process has a copy, and no checkpoint holds it "


@pytest.mark.parametrize(
    ("task", "strategy", "settings", "said"),
    [
        (Tokens, "ddp", {}, "state that collate keeps (task.vocabulary): each rank's own"),
        (Tokens, "dp", {}, None),
        (Tokens, "ddp", {"num_workers": 1}, _OF_WORKERS.format("task.vocabulary")),
        (Warming, "ddp", {}, None),
        (Warming, "single", {"microbatch_size": 2}, "state that collate keeps (task.calls): each microbatch's own"),
        (Masking, "fsdp", {}, None),
        (Mixing, "dp", {}, None),
        (Mixing, "ddp", {}, "random numbers in collate: drawn for each of the 2 parts of a batch"),
    ],
)
def test_run_when_collate_keeps_state_then_it_is_exact_or_that_is_declared(
    task: type[ZooTask], strategy: str, settings: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    nproc = 1 if strategy == "single" else 2
    run = train_case(tmp_path, task(), strategy, nproc, **STEPS, **settings)
    (*declared,) = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert [text[: len(said)] if said else text for text in declared] == [said] * (said is not None)
    if said is None:
        alone = weights_of(train_case(tmp_path, task(), **STEPS))
        assert largest_difference(weights_of(run), alone) < 1e-10


class KeepsOddOnes(ZooTask):
    """Counts evaluated samples with a large target, of which one rank alone has some, once training is under way."""

    def __init__(self) -> None:
        self.steps = self.found = 0

    def eval_data(self) -> Any:
        x, y = data(8, seed=2)
        y[:, 0] = torch.tensor([0.0] * 7 + [9.0])
        return Samples(x, y)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        if model.training:
            self.steps += 1
        elif self.steps > 3:
            self.found += int((y[:, 0] > 8).sum())
        return functional.mse_loss(model(x), y)


def test_evaluation_when_it_changes_state_on_one_rank_of_fsdp_then_that_is_declared(tmp_path: Path) -> None:
    run = train_case(tmp_path, KeepsOddOnes(), "fsdp", 2, **STEPS)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert "state that the evaluation keeps (task.found): of the batches that each rank evaluates" in declared
