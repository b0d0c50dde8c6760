"""Script written for Horovod, rightly or with one of several mistakes (`horovod_script.py VARIANT`)."""

import sys

import horovod.torch as hvd  # type: ignore[import-not-found]
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VARIANT = sys.argv[1]


def main() -> None:
    hvd.init()
    torch.manual_seed(hvd.rank())
    numbers = torch.Generator().manual_seed(0)
    samples = TensorDataset(torch.randn(48, 6, generator=numbers), torch.randint(0, 3, (48,), generator=numbers))
    sampler = DistributedSampler(samples, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(samples, 4, sampler=None if VARIANT == "no sampler" else sampler)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    rate = 0.01 * (hvd.size() if VARIANT == "scaled rate" else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    if VARIANT != "no broadcast":
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if VARIANT != "plain optimiser":
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            op=hvd.Sum if VARIANT == "summed" else hvd.Average,
            backward_passes_per_step=2 if VARIANT == "accumulated and clipped" else 1,
        )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            if VARIANT == "accumulated and clipped":
                (functional.cross_entropy(model(x), y) / 2).backward()
                if number % 2:
                    optimizer.synchronize()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    with optimizer.skip_synchronize():
                        optimizer.step()
                    optimizer.zero_grad()
                continue
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()


main()
