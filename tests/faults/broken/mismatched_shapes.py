"""Ranks that do not agree on a shape."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(4))  # at: 0
else:
    dist.all_reduce(torch.ones(4096))  # at: 1
