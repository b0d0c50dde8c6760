"""Cases of the checkpoint tests: a small trained model, a snapshot of it, and ranks as threads."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from dure.comm.groups import Solo
from dure.strategies.state.optimizer import optimizer_to_names
from dure.training.checkpoints.async_save import AsyncSave, SavedCheckpoint
from dure.training.checkpoints.state import Position, Snapshot
from dure.training.checkpoints.store import CheckpointStore


class TiedNet(nn.Module):
    """Tied weights, BatchNorm buffers (one of them an integer of no dimension), a frozen parameter."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(tokens)))


def train(model: nn.Module, optimizer: Optimizer, steps: int, seed: int = 0) -> None:
    """Take a few steps on random tokens."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(10, (8,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), tokens).backward()
        optimizer.step()


def trained(make: Callable[[Any], Optimizer] = AdamW, seed: int = 0) -> tuple[TiedNet, Optimizer]:
    """Return a model and its optimiser after three steps."""
    torch.manual_seed(seed)
    model = TiedNet()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    train(model, optimizer, 3)
    return model, optimizer


def snapshot_of(model: nn.Module, optimizer: Optimizer, rank: int = 0, extra: Any = None) -> Snapshot:
    """Return what the worker would give to `save`."""
    per_rank = {"torch": torch.arange(rank, rank + 16, dtype=torch.uint8)}
    named = optimizer_to_names(model, optimizer)
    return Snapshot(model=model.state_dict(), optimizer=named, extra=extra, per_rank=per_rank)


def at(samples: int) -> Position:
    """Return a position by its samples."""
    return Position(samples_seen=samples, step=samples // 8, epoch=0)


def save(
    store: CheckpointStore, snapshot: Snapshot, position: Position, group: Any, **settings: Any
) -> SavedCheckpoint:
    """Save a checkpoint and wait for it."""
    pending = AsyncSave(store, position, group, **settings).begin(snapshot, group)
    pending.write()
    saved = pending.settle(group)
    assert saved is not None
    return saved


def save_at(store: CheckpointStore, samples: int, **settings: Any) -> SavedCheckpoint:
    """Save a trained model in one process."""
    model, optimizer = trained(seed=samples)
    return save(store, snapshot_of(model, optimizer), at(samples), Solo(), **settings)


def new_store(root: Path, keep: int = 2) -> tuple[CheckpointStore, list[str]]:
    """Return a store and the list of what it warns of."""
    warnings: list[str] = []
    return CheckpointStore(root, keep, warnings.append), warnings


def flip_bit(path: Path, bit: int) -> None:
    """Change one bit of a file in place."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


class ThreadGroup:
    """Ranks as threads of this process."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._values: list[Any] = [None] * world_size
        self._barrier = threading.Barrier(world_size, timeout=20)

    def run(self, work: Callable[["ThreadRank"], Any]) -> list[Any]:
        """Run `work` on every rank and return the answers or exceptions."""
        answers: list[Any] = [None] * self.world_size

        def one(rank: int) -> None:
            try:
                answers[rank] = work(ThreadRank(self, rank))
            except Exception as error:
                answers[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Give every rank all values."""
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


class ThreadRank:
    """One of the ranks of a `ThreadGroup`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.world_size = group.world_size

    def all_gather_json(self, value: Any, /) -> list[Any]:
        """Return every rank's value after a trip through JSON."""
        return [json.loads(text) for text in self._group.exchange(self.rank, json.dumps(value))]
