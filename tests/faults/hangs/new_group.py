"""A group that one rank does not help to make."""

# culprits: 2
import sys
import time

import torch
import torch.distributed as dist

is_slow = "slow" in sys.argv
seconds = 5 if is_slow else 1000
dist.init_process_group("gloo")
rank = dist.get_rank()
ones = torch.ones(3)
if is_slow and rank == 2:
    time.sleep(seconds)  # slow: 2
if rank != 2 or is_slow:
    dist.new_group([0, 1, 2])  # at: 0 1
dist.barrier()  # at: 2
