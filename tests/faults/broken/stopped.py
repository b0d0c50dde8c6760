"""One rank is stopped from outside."""

import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(6):
    if dist.get_rank() == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    model(torch.ones(2, 4)).sum().backward()  # at: 0 2
    optimizer.step()
