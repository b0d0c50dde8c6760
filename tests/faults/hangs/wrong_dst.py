"""A rank sends to the wrong one."""

# culprits: 0 1 2
import sys
import time

import torch
import torch.distributed as dist

is_slow = "slow" in sys.argv
seconds = 5 if is_slow else 1000
dist.init_process_group("gloo")
rank = dist.get_rank()
ones = torch.ones(3)
wrong = 1 if is_slow else 2
if rank == 0:
    time.sleep(5 if is_slow else 0)  # slow: 0
    dist.send(torch.ones(2**20), dst=wrong)  # at: 0
elif rank == 1:
    dist.recv(torch.ones(2**20), src=0)  # at: 1
dist.barrier()  # at: 2
