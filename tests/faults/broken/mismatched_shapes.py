"""Ranks that do not agree on a shape."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.all_reduce(torch.ones(4 if dist.get_rank() == 0 else 4096))  # blamed: 0 1
