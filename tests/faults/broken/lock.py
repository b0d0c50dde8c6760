"""One rank waits for a lock that it holds itself."""

import threading

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
lock = threading.Lock()
for step in range(6):
    if dist.get_rank() == 1 and step > 2:
        lock.acquire()  # at: 1
    dist.all_reduce(torch.ones(4))  # at: 0 2
