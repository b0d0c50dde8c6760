"""One rank waits for a lock on a file that another process has."""

# culprits: 1
import fcntl
import os
import subprocess
import sys
import tempfile
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
        with tempfile.TemporaryDirectory() as name:
            path = os.path.join(name, "lock")
            holder = subprocess.Popen(["flock", path, "sleep", str(seconds)])
            time.sleep(0.5)
            with open(path, "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # at: 1
            holder.wait()
    dist.barrier()  # at: 0 2
