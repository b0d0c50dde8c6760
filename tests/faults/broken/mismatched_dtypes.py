"""Ranks that do not agree on a type."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
dist.all_reduce(torch.ones(64, dtype=torch.float32 if dist.get_rank() == 0 else torch.float64))  # blamed: 0 1
