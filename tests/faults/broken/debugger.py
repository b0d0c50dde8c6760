"""A breakpoint that was left in, on one rank."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    breakpoint()
    value = 1  # at: 1
dist.all_reduce(torch.ones(1))
