"""Ranks name another source of a broadcast, and each has its own."""

# culprits: 0 1 2
import sys
import time

import torch
import torch.distributed as dist

is_slow = "slow" in sys.argv
seconds = 5 if is_slow else 1000
dist.init_process_group("gloo")
rank = dist.get_rank()
ones = torch.ones(3)
if is_slow and rank == 1:
    time.sleep(seconds)  # slow: 1
dist.broadcast(ones, src=0 if is_slow else rank)  # at: 0 1 2
dist.barrier()  # then: 0 2
