"""Ranks that do not agree on what comes first."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
weights, loss = torch.ones(8), torch.ones(2)
if dist.get_rank() == 0:
    dist.broadcast(weights, 1)  # at: 0
    dist.all_reduce(loss)
else:
    dist.all_reduce(loss)  # at: 1 2
    dist.broadcast(weights, 1)
