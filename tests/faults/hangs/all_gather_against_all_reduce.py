"""One rank gathers where the others reduce."""

# culprits: 0
import sys
import time

import torch
import torch.distributed as dist

is_slow = "slow" in sys.argv
seconds = 5 if is_slow else 1000
dist.init_process_group("gloo")
rank = dist.get_rank()
ones = torch.ones(3)
if is_slow:
    time.sleep(seconds * (rank == 0))  # slow: 0
    dist.all_reduce(ones)  # then: 1 2
elif rank == 0:
    dist.all_gather([torch.ones(3) for _ in range(3)], ones)  # at: 0
else:
    dist.all_reduce(ones)  # at: 1 2
