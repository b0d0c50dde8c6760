"""One rank gathers while the others are in a step."""

# culprits: 0
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
model = DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(5):
    if rank == 0 and step == 3 and is_slow:
        time.sleep(seconds)  # slow: 0
    elif rank == 0 and step == 3:
        dist.all_gather([torch.ones(3) for _ in range(3)], ones)  # at: 0
    model(ones).sum().backward()  # at: 1 2
    optimizer.step()
