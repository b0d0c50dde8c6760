"""One rank waits for a key that nobody sets."""

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
        if is_slow:
            time.sleep(seconds)  # slow: 1
        else:
            dist.distributed_c10d._get_default_store().wait(["never"])  # at: 1
    dist.barrier()  # at: 0 2
