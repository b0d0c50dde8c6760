"""One rank waits for an item that nobody puts."""

# culprits: 1
import queue
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
        q = queue.Queue()
        threading.Timer(seconds, q.put, (0,)).start() if is_slow else None
        q.get()  # at: 1
    dist.barrier()  # at: 0 2
