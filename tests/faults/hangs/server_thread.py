"""A thread receives while the main thread works, and the rank that is to send sleeps."""

# culprits: 1
import sys
import threading
import time

import torch
import torch.distributed as dist

is_slow = "slow" in sys.argv
seconds = 5 if is_slow else 1000
dist.init_process_group("gloo")
rank = dist.get_rank()
ones = torch.ones(3)
if rank == 0:
    threading.Thread(target=dist.recv, args=(torch.ones(3),), kwargs={"src": 1, "tag": 7}, daemon=True).start()
dist.barrier()
if rank == 1:
    time.sleep(seconds)  # at: 1
    dist.send(ones, dst=0, tag=7)
dist.barrier()  # at: 0 2
