"""One rank waits for a signal."""

# culprits: 1
import signal
import sys

import torch
import torch.distributed as dist

is_slow = "slow" in sys.argv
seconds = 5 if is_slow else 1000
dist.init_process_group("gloo")
rank = dist.get_rank()
ones = torch.ones(3)
for step in range(3):
    if rank == 1 and step == 2:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(seconds)
        signal.pause()  # at: 1
    dist.barrier()  # at: 0 2
