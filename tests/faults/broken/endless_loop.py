"""One rank computes for ever."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(6):
    while dist.get_rank() == 1 and step == 3:  # at: 1
        step += 0  # at: 1
    dist.all_reduce(torch.ones(4))  # at: 0 2
