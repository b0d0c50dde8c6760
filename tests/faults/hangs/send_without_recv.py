"""A rank sends what nobody receives."""

# culprits: 0 1
import sys
import time

import torch
import torch.distributed as dist

is_slow = "slow" in sys.argv
seconds = 5 if is_slow else 1000
dist.init_process_group("gloo")
rank = dist.get_rank()
ones = torch.ones(3)
if rank == 0 and not is_slow:
    dist.send(torch.ones(2**20), dst=1)  # at: 0
elif rank == 0:
    time.sleep(seconds)  # slow: 0
dist.barrier()  # at: 1 2
