"""One rank gathers objects where the others are in a barrier."""

# culprits: 0
import sys
import time

import torch
import torch.distributed as dist

is_slow = "slow" in sys.argv
seconds = 5 if is_slow else 1000
dist.init_process_group("gloo")
rank = dist.get_rank()
ones = torch.ones(3)
if rank == 0 and is_slow:
    time.sleep(seconds)  # slow: 0
elif rank == 0:
    dist.all_gather_object([None] * 3, "word")  # at: 0
dist.barrier()  # at: 1 2
