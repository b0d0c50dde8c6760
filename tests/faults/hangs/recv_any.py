"""A rank receives from whoever sends, and nobody does."""

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
if rank == 2 and not is_slow:
    dist.recv(ones)  # at: 2
elif rank == 2:
    time.sleep(seconds)  # slow: 2
dist.barrier()  # at: 0 1
