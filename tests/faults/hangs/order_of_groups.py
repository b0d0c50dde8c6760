"""Two groups in another order."""

# culprits: 0 1
import sys
import time

import torch
import torch.distributed as dist

is_slow = "slow" in sys.argv
seconds = 5 if is_slow else 1000
dist.init_process_group("gloo")
rank = dist.get_rank()
ones = torch.ones(3)
groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
if is_slow:
    time.sleep(seconds * (rank == 0))  # slow: 0
elif rank < 2:
    dist.all_reduce(ones, group=groups[rank])  # at: 0 1
    dist.all_reduce(ones, group=groups[1 - rank])
dist.barrier()  # at: 2 # then: 1
