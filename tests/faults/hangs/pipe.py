"""One rank reads a pipe that nobody writes."""

# culprits: 1
import os
import sys
import threading

import torch
import torch.distributed as dist

is_slow = "slow" in sys.argv
seconds = 5 if is_slow else 1000
dist.init_process_group("gloo")
rank = dist.get_rank()
ones = torch.ones(3)
for step in range(3):
    if rank == 1 and step == 2:
        end, other = os.pipe()
        threading.Timer(seconds, os.write, (other, b"x")).start() if is_slow else None
        os.read(end, 1)  # at: 1
    dist.barrier()  # at: 0 2
