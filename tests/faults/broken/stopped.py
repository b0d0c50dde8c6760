"""One rank is stopped from outside."""

import os
import signal

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(6):
    if dist.get_rank() == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(4))  # blamed: 0 waits
