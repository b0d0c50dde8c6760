"""Script that reduces by hand, or by another library than DistributedDataParallel (`hand.py VARIANT`)."""

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VARIANT = sys.argv[1]
BATCH, EPOCHS = 4, 2

dist.init_process_group("gloo")
RANK, RANKS = dist.get_rank(), dist.get_world_size()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm: nn.Module = nn.BatchNorm1d(8) if VARIANT.startswith("norm") else nn.Identity()
        self.memory = nn.LSTM(8, 8, 2, dropout=0.5) if VARIANT == "dropout of an LSTM" else None
        self.attention = nn.MultiheadAttention(8, 2, 0.3, batch_first=True) if "attention" in VARIANT else None
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.body(x)))
        if VARIANT == "buffer of one rank":
            with torch.no_grad():
                self.centre.lerp_(hidden.mean(0), 0.5)  # type: ignore[operator]
            hidden = hidden - self.centre
        if self.memory is not None:
            hidden = self.memory(hidden[None])[0][0]
        if self.attention is not None:
            hidden = self.attention(hidden[:, None], hidden[:, None], hidden[:, None], need_weights=False)[0][:, 0]
        out: Tensor = self.head(hidden)
        return out


def wrapped(model: nn.Module) -> nn.Module:
    if VARIANT.startswith("FSDP1"):
        with warnings.catch_warnings(action="ignore"):  # it is deprecated
            from torch.distributed.fsdp import FullyShardedDataParallel

            return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params="original" in VARIANT)
    if VARIANT.startswith("FSDP2"):
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    return model


def average(tensors: Any) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= RANKS


def main() -> None:
    numbers = torch.Generator().manual_seed(0)
    samples = TensorDataset(torch.randn(48, 6, generator=numbers), torch.randint(0, 3, (48,), generator=numbers))
    loader = DataLoader(samples, BATCH, sampler=DistributedSampler(samples, shuffle=False))
    torch.manual_seed(RANK if VARIANT == "frozen part by rank" else 7)
    frozen = nn.Linear(6, 6).requires_grad_(False) if VARIANT == "frozen part by rank" else nn.Identity()
    torch.manual_seed(7)
    model = wrapped(Model())
    parameters = [*model.parameters()]
    is_sharded = VARIANT.startswith("FSDP")
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.0 if "weights" in VARIANT else 0.9)
    every = 4 // RANKS if VARIANT.startswith("accumulated") else 1
    for epoch in range(EPOCHS):
        model.norm.train(epoch == 1 or VARIANT != "norm of a later epoch")  # type: ignore[union-attr]
        for number, (x, y) in enumerate(loader):
            if VARIANT == "frozen at another step" and number == 1 + RANK:
                model.body.requires_grad_(False)  # type: ignore[union-attr]
            if VARIANT == "noise and ignored classes":
                x = x + torch.randn_like(x) * torch.rand(len(x), 1)
                y = torch.where(y == 2, -100, y)
            loss = functional.cross_entropy(model(frozen(x)), y) / every
            if VARIANT == "norm, and scaled by rank":
                loss = loss * (1 + RANK)
            if VARIANT == "FSDP1, divided twice":
                loss = loss / RANKS
            loss.backward()
            if (number + 1) % every:
                continue
            if VARIANT == "clipped before the average":
                nn.utils.clip_grad_norm_(parameters, 0.1)
            if VARIANT.startswith("FSDP1") and "clipped" in VARIANT:
                model.clip_grad_norm_(0.1)  # type: ignore[operator]
            if "weights" not in VARIANT and not is_sharded:
                for each in parameters:
                    if each.grad is None:
                        each.grad = torch.zeros_like(each) if VARIANT != "frozen at another step" else None
                    dist.all_reduce(each.grad if each.grad is not None else torch.zeros_like(each))
                    if each.grad is not None:
                        each.grad /= RANKS
            if VARIANT != "steps of rank 0" or RANK == 0:
                optimizer.step()
            optimizer.zero_grad()
            if VARIANT == "steps of rank 0":
                for each in parameters:
                    dist.broadcast(each.data, 0)
            if VARIANT == "weights averaged" or (VARIANT == "weights averaged sometimes" and number % 2):
                average(each.data for each in parameters)


main()
