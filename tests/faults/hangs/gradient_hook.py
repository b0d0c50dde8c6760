"""A hook on a gradient sleeps on one rank."""

# culprits: 1
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

is_slow = "slow" in sys.argv
seconds = 5 if is_slow else 1000
dist.init_process_group("gloo")
rank = dist.get_rank()
ones = torch.ones(3)
layer = torch.nn.Linear(3, 1)
model = DistributedDataParallel(layer)
calls = []


def hook(gradient):
    calls.append(gradient)
    if rank == 1 and len(calls) == 3:
        time.sleep(seconds)  # at: 1


layer.weight.register_hook(hook)
for _ in range(5):
    model(ones).sum().backward()  # at: 0 2
