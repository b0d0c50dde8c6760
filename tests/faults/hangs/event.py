"""One rank waits for an event that nobody sets."""

# culprits: 1
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
        event = threading.Event()
        event.wait(seconds)  # at: 1
    dist.barrier()  # at: 0 2
