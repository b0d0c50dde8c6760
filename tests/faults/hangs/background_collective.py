"""A rank sleeps while a collective of its own is under way."""

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
    work = dist.all_reduce(ones, async_op=True)
    time.sleep(seconds)  # at: 1
    dist.send(ones, dst=0)
    work.wait()
elif rank == 0:
    dist.recv(torch.ones(3), src=1)  # at: 0
    dist.all_reduce(ones)
else:
    dist.all_reduce(ones)  # at: 2
