"""A rank asks again and again whether a collective is done."""

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
if rank == 1:
    time.sleep(seconds)  # at: 1
work = dist.all_reduce(ones, async_op=True)  # at: 0 2
while not work.is_completed():  # at: 0 2
    pass  # at: 0 2
