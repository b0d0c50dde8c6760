"""One rank waits for a program."""

# culprits: 1
import subprocess
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
        subprocess.run(["sleep", str(seconds)], check=True)  # at: 1
    dist.barrier()  # at: 0 2
