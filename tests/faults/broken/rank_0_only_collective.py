"""Rank 0 logs a mean that needs all ranks, and asks nobody else."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
loss = torch.ones(())
if dist.get_rank() == 0:
    dist.all_reduce(loss)  # at: 0
dist.barrier()  # at: 1 2
