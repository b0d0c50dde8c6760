"""One rank waits for processes of its own."""

# culprits: 1
import multiprocessing
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
        with multiprocessing.get_context("fork").Pool(1) as workers:
            workers.map(time.sleep, [seconds])  # at: 1
    dist.barrier()  # at: 0 2
