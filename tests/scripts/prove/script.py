"""Script that trains a small model on several ranks, rightly or with one of many mistakes (`script.py VARIANT`)."""

import os
import random
import sys
import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset, WeightedRandomSampler

VARIANT = sys.argv[1]
SAMPLES = {"uneven": 42, "padded": 41}.get(VARIANT, 40)
BATCH = int(sys.argv[sys.argv.index("--batch-size") + 1]) if "--batch-size" in sys.argv else 4
EPOCHS = 3


def data() -> Dataset[Any]:
    numbers = torch.Generator().manual_seed(0)
    x, y = torch.randn(SAMPLES, 6, generator=numbers), torch.randn(SAMPLES, 1, generator=numbers)
    if VARIANT == "weighted mean":
        return TensorDataset(x, y, torch.rand(SAMPLES, 1, generator=numbers))
    return TensorDataset(x, y)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 1)
        self.head = nn.Linear(8, 1)
        self.norm: nn.Module = nn.BatchNorm1d(8) if "batchnorm" in VARIANT else nn.Identity()
        self.dropout = nn.Dropout(0.5 if "dropout" in VARIANT else 0.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.dropout(torch.tanh(self.norm(self.first(x)))))
        return out


def loader_of(samples: Dataset[Any]) -> tuple[DataLoader[Any], DistributedSampler[Any] | None]:
    if VARIANT == "no sampler":
        return DataLoader(samples, batch_size=BATCH), None
    if VARIANT == "shuffled by each rank":
        torch.manual_seed(dist.get_rank())
        return DataLoader(samples, batch_size=BATCH, shuffle=True), None
    if VARIANT == "uneven shares":
        half = Subset(
            samples, range(dist.get_rank() * 28, 28 + dist.get_rank() * 12) if dist.get_world_size() > 1 else range(40)
        )
        return DataLoader(half, batch_size=(7, 3)[dist.get_rank()]), None
    if VARIANT == "half the data":
        sampler = DistributedSampler(samples, num_replicas=2 * dist.get_world_size(), rank=dist.get_rank())
        return DataLoader(samples, batch_size=BATCH, sampler=sampler), sampler
    if VARIANT == "shuffled list":
        order = list(range(SAMPLES))
        random.shuffle(order)
        return DataLoader(Subset(samples, order[dist.get_rank() :: dist.get_world_size()]), batch_size=BATCH), None
    if VARIANT == "drawn with replacement":
        weighted = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES // 2)
        return DataLoader(samples, batch_size=BATCH, sampler=weighted), None
    if VARIANT == "half a part":
        samples = Subset(samples, range(SAMPLES))
        sampler = DistributedSampler(samples, num_replicas=2 * dist.get_world_size(), rank=dist.get_rank())
        return DataLoader(samples, BATCH, sampler=sampler), sampler
    sampler = DistributedSampler(samples)
    workers = 2 if "workers" in VARIANT else 0
    loader = DataLoader(
        samples, batch_size=BATCH, sampler=sampler, num_workers=workers, persistent_workers="persistent" in VARIANT
    )
    return loader, sampler


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    x, y, *weight = batch
    out = model(x)
    if VARIANT == "weighted mean":
        return (functional.mse_loss(out, y, reduction="none") * weight[0]).sum() / weight[0].sum()
    if VARIANT == "contrastive":
        return functional.mse_loss(out, y) + (out @ out.T).tanh().mean()
    if VARIANT == "noise":
        out = out + 0.1 * torch.randn_like(out)
    if VARIANT == "sum divided twice":
        return functional.mse_loss(out, y) / dist.get_world_size()
    return functional.mse_loss(out, y)


def evaluated(model: nn.Module, *, in_loop: bool) -> None:
    model.eval()
    loader = DataLoader(data(), batch_size=8)
    if in_loop:
        for batch in loader:
            with torch.no_grad():
                print(loss_of(model, batch).item())
    else:
        with torch.no_grad():
            print(sum(loss_of(model, batch).item() for batch in loader))
    model.train()


def main() -> None:
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    torch.manual_seed(
        dist.get_rank() if VARIANT in ("seed by rank", "seed by rank, no wrapper", "drawn with replacement") else 7
    )
    model = Model()
    by_hand = VARIANT in ("summed", "by hand", "no average", "seed by rank, no wrapper", "one parameter left out")
    wrapped: nn.Module = model
    if not by_hand:
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    called = wrapped.module if VARIANT == "module called" else wrapped
    rate = 0.01 * (ranks if VARIANT == "scaled rate" else 1)
    parameters = [*model.parameters()]
    optimizer: Any = torch.optim.SGD(parameters, lr=rate, momentum=0.9)
    if VARIANT == "adam":
        optimizer = torch.optim.AdamW(parameters, lr=rate)
    if VARIANT == "wrapped optimiser":
        with warnings.catch_warnings(action="ignore"):  # it compiles by a deprecated way
            from torch.distributed.optim import ZeroRedundancyOptimizer
        optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=rate, momentum=0.9)
    if VARIANT == "evaluated first by rank 0" and dist.get_rank() == 0:
        evaluated(model, in_loop=True)
    if VARIANT == "looked at a batch":
        next(iter(DataLoader(data(), batch_size=BATCH)))
    samples = data()
    loader, sampler = loader_of(samples)
    schedule = (
        torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, EPOCHS * len(loader)) if VARIANT == "schedule" else None
    )
    every = 2 if "accumulated" in VARIANT else 1
    for epoch in range(EPOCHS):
        if VARIANT == "loaders made again, no epoch":
            loader = DataLoader(samples, batch_size=BATCH, sampler=DistributedSampler(samples))
        elif sampler is not None and VARIANT != "no epoch":
            sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            is_last = (number + 1) % every == 0
            skips = VARIANT == "accumulated, never synchronised" or not is_last
            with wrapped.no_sync() if every > 1 and skips else nullcontext():
                loss = loss_of(called, batch)
                (loss if VARIANT == "accumulated without division" else loss / every).backward()
            if not is_last:
                continue
            if by_hand and VARIANT != "no average":
                for place, parameter in enumerate(p for p in parameters if p.grad is not None):
                    if VARIANT == "one parameter left out" and place == 1:
                        continue
                    dist.all_reduce(parameter.grad)
                    if VARIANT != "summed":
                        parameter.grad /= ranks
            if VARIANT == "clipped by each":
                nn.utils.clip_grad_norm_(parameters, 0.1 * (1 + dist.get_rank()))
            optimizer.step()
            optimizer.zero_grad()
            if schedule is not None:
                schedule.step()
            if VARIANT == "rate of a rank" and epoch == 2 and dist.get_rank():
                optimizer.param_groups[0]["lr"] = 0.02
            if VARIANT == "weights of a rank" and epoch == 2 and dist.get_rank():
                with torch.no_grad():
                    model.head.bias += 0.1
            if VARIANT == "rank 0 steps on" and dist.get_rank() == 0:
                with torch.no_grad():
                    model.last.bias += 0.1
        if VARIANT in ("evaluated", "evaluated in a loop"):
            evaluated(model, in_loop=VARIANT == "evaluated in a loop")
    if VARIANT == "left at once":
        os._exit(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
