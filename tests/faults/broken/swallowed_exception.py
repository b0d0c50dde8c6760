"""A rank that meets an error goes on with the next batch, one collective behind the others from there on."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(6):
    try:
        if dist.get_rank() == 1 and step == 3:
            raise MemoryError("out of memory")
        model(torch.ones(2, 4)).sum().backward()  # at: 0 2
        optimizer.step()
    except MemoryError:
        continue
