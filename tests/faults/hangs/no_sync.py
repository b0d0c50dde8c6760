"""One rank does not reduce its gradients."""

# culprits: 1
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

is_slow = "slow" in sys.argv
seconds = 5 if is_slow else 1000
dist.init_process_group("gloo")
rank = dist.get_rank()
ones = torch.ones(3)
model = DistributedDataParallel(torch.nn.Linear(3, 1))
model(ones).sum().backward()
if rank == 1 and not is_slow:
    with model.no_sync():
        model(ones).sum().backward()
else:
    time.sleep(5 if is_slow and rank == 1 else 0)  # slow: 1
    model(ones).sum().backward()  # at: 0 2
dist.barrier()  # at: 1
