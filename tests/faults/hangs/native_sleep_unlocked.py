"""One rank is asleep in native code that gives Python's lock away."""

# culprits: 1
import ctypes
import sys

import torch
import torch.distributed as dist

is_slow = "slow" in sys.argv
seconds = 5 if is_slow else 1000
dist.init_process_group("gloo")
rank = dist.get_rank()
ones = torch.ones(3)
for step in range(3):
    if rank == 1 and step == 2:
        assert ctypes.CDLL(None).usleep(seconds * 1000000 if is_slow else 999999999) == 0  # at: 1
    dist.barrier()  # at: 0 2
