"""Ranks that do not agree on a type."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(64))  # at: 0
else:
    dist.all_reduce(torch.ones(64, dtype=torch.float64))  # at: 1
