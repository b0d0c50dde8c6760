"""A send and a receive with different tags."""

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
if rank == 0:
    time.sleep(5 if is_slow else 0)  # slow: 0
    dist.send(ones, dst=1, tag=1)  # at: 0
elif rank == 1:
    dist.recv(ones, src=0, tag=1 if is_slow else 2)  # at: 1
dist.barrier()  # at: 2
