"""One rank is in native code that never gives Python's lock back."""

import re

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(6):
    if dist.get_rank() == 1 and step == 3:
        re.match(r"(a+)+$", "a" * 64 + "b")  # at: 1
    dist.all_reduce(torch.ones(4))  # at: 0 2
