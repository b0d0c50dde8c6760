"""One rank is stopped, and perhaps let go on."""

# culprits: 1
import os
import signal
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
            os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()  # at: 0 2
