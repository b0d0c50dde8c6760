"""A barrier that only the rank which saves comes to."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for step in range(6):
    model(torch.ones(2, 4)).sum().backward()  # at: 1 2
    optimizer.step()
    if dist.get_rank() == 0 and step == 3:
        model.state_dict()
        dist.barrier()  # at: 0
