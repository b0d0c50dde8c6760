"""One rank computes in native code that keeps Python's lock."""

# culprits: 1
import sys
import time

import torch
import torch.distributed as dist

is_slow = "slow" in sys.argv
seconds = 5 if is_slow else 1000
dist.init_process_group("gloo")
rank = dist.get_rank()
ones = torch.ones(3)
for step in range(3):
    if rank == 1 and step == 2:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(10**7 if is_slow else 10**12))  # at: 1
    dist.barrier()  # at: 0 2
