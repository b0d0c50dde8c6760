"""Two ranks receive from each other while the third is in a barrier."""

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
if is_slow:
    time.sleep(seconds)  # slow: 0 1 2
    dist.barrier()
elif rank < 2:
    dist.recv(ones, src=1 - rank)  # at: 0 1
dist.barrier()  # at: 2
