"""Every rank waits for what its neighbour was to send; torch keeps nowhere from whom."""

# culprits:
import sys
import time

import torch
import torch.distributed as dist

is_slow = "slow" in sys.argv
seconds = 5 if is_slow else 1000
dist.init_process_group("gloo")
rank = dist.get_rank()
ones = torch.ones(3)
if is_slow:
    time.sleep(seconds)  # slow: 0 1 2
    dist.barrier()
else:
    work = dist.irecv(ones, src=(rank + 1) % 3)
    work.wait()  # at: 0 1 2
