"""Script whose ranks read their own shares of the data, rightly or with one of many mistakes (`shares.py VARIANT`)."""

import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

VARIANT = sys.argv[1]
SAMPLES, BATCH, EPOCHS = 48, 4, 2

dist.init_process_group("gloo")
RANK, RANKS = dist.get_rank(), dist.get_world_size()


def tensors(num_samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(0)
    return torch.randn(num_samples, 6, generator=numbers), torch.randint(0, 3, (num_samples,), generator=numbers)


class Stream(IterableDataset[Any]):
    def __init__(self, *, is_divided: bool, noise: float = 0.0) -> None:
        self.start, self.step = (RANK, RANKS) if is_divided else (0, 1)
        self.noise, self.numbers = noise, torch.Generator().manual_seed(RANK)

    def __iter__(self) -> Iterator[Any]:
        x, y = tensors()
        for number in range(self.start, SAMPLES, self.step):
            yield x[number] + self.noise * torch.randn(6, generator=self.numbers), y[number]


class Batches(Sampler[list[int]]):
    """Batches of all ranks, of which each takes its part; the last one is filled up."""

    epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.RandomState(self.epoch).permutation(46).tolist()
        order += order[: -len(order) % (RANKS * BATCH)] if RANKS > 1 else []
        for start in range(0, len(order), RANKS * BATCH):
            yield order[start : start + RANKS * BATCH][RANK::RANKS]


class Augmented(Dataset[Any]):
    """Samples that are other ones each time, in a way that no seed repeats."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.numbers = x, y, np.random.default_rng()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] + float(self.numbers.normal()), self.y[index]


def loader() -> DataLoader[Any]:
    x, y = tensors()
    if VARIANT == "slices":
        return DataLoader(TensorDataset(x[RANK::RANKS], y[RANK::RANKS]), BATCH, shuffle=True)
    if VARIANT == "overlapping slices":
        here = slice(RANK * 16, RANK * 16 + 32) if RANKS > 1 else slice(None)
        return DataLoader(TensorDataset(x[here], y[here]), BATCH, shuffle=True)
    if VARIANT == "half slices":
        size = SAMPLES // RANKS // (1 if RANKS == 1 else 2)
        here = slice(RANK * size, RANK * size + size)
        return DataLoader(TensorDataset(x[here], y[here]), BATCH, shuffle=True)
    if VARIANT == "unequal last batch":
        samples = TensorDataset(*tensors(55))
        return DataLoader(Subset(samples, range(RANK, 55, RANKS)), BATCH)
    if VARIANT == "divided stream":
        return DataLoader(Stream(is_divided=True), BATCH)
    if VARIANT == "undivided stream":
        return DataLoader(Stream(is_divided=False), BATCH)
    if VARIANT == "undivided stream with noise":
        return DataLoader(Stream(is_divided=False, noise=0.3), BATCH)
    if VARIANT == "augmented slices":
        return DataLoader(Augmented(x[RANK::RANKS], y[RANK::RANKS]), BATCH, shuffle=True)
    if VARIANT == "augmented, undivided":
        return DataLoader(Augmented(x, y), BATCH, sampler=DistributedSampler(range(SAMPLES), 1, 0))
    if VARIANT == "the same draws":
        return DataLoader(TensorDataset(x, y), BATCH, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES))
    if VARIANT == "long and unseeded":
        order = [*range(2000)]
        random.shuffle(order)
        return DataLoader(Subset(TensorDataset(*tensors(2000)), order[RANK::RANKS]), 40)
    if VARIANT.startswith("sampler of batches"):
        return DataLoader(TensorDataset(*tensors(46)), batch_sampler=Batches())
    sampler = DistributedSampler(samples := TensorDataset(x, y), shuffle=False)
    if VARIANT == "made at two lines" and RANK:
        return DataLoader(samples, BATCH, sampler=sampler)
    return DataLoader(samples, BATCH, sampler=sampler)


def main() -> None:
    torch.manual_seed(7)
    data = loader()
    if VARIANT.startswith("rank 1 stops"):
        torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 16 // RANKS)
    if VARIANT == "schedule by the sampler":
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, len(data.sampler) // BATCH)  # type: ignore[arg-type]
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=9)
    for epoch in range(EPOCHS):
        if VARIANT == "sampler of batches":
            data.batch_sampler.epoch = epoch  # type: ignore[union-attr]
        for number, (x, y) in enumerate(data):
            if VARIANT == "rank 1 stops" and RANK == 1 and epoch == 1 and number == 2:
                return
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if VARIANT in ("late schedule", "schedule by the sampler"):
                schedule.step()
        if VARIANT == "plateau of a rank's loss":
            plateau.step(functional.cross_entropy(model.module(x), y).item())


main()
