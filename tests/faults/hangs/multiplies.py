"""One rank computes in torch."""

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
        matrix, end = torch.rand(256, 256), time.monotonic() + seconds
        while time.monotonic() < end:  # at: 1
            matrix = matrix @ matrix / 256  # at: 1
    dist.barrier()  # at: 0 2
