"""One rank exchanges with all where the others reduce."""

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
if rank == 2 and is_slow:
    time.sleep(seconds)  # slow: 2
elif rank == 2:
    dist.all_to_all_single(torch.ones(3), ones)  # at: 2
dist.all_reduce(ones)  # at: 0 1
