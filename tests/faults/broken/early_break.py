"""One rank has had enough two steps before the others."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(6):
    if dist.get_rank() == 1 and step == 4:
        break
    model(torch.ones(2, 4)).sum().backward()  # at: 0 2
    optimizer.step()
dist.barrier()  # at: 1
