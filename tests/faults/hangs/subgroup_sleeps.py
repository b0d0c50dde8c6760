"""A member of a group sleeps, and the third rank is in a barrier."""

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
group = dist.new_group([1, 2])
if rank == 2:
    time.sleep(seconds)  # at: 2
if rank > 0:
    dist.all_reduce(ones, group=group)  # at: 1
dist.barrier()  # at: 0
