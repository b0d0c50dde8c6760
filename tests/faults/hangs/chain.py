"""A rank waits for one that waits for one that sleeps."""

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
if rank == 2:
    time.sleep(seconds)  # at: 2
if rank > 0:
    dist.send(ones, dst=rank - 1) if rank == 2 else dist.recv(ones, src=2)  # at: 1
if rank < 2:
    dist.recv(ones, src=1) if rank == 0 else dist.send(ones, dst=0)  # at: 0
