"""One rank broadcasts objects where the others gather them."""

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
if rank == 1 and is_slow:
    time.sleep(seconds)  # slow: 1
if rank == 1 and not is_slow:
    dist.broadcast_object_list([0], src=0)  # at: 1
dist.all_gather_object([None] * 3, "word")  # at: 0 2
