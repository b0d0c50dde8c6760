"""One rank never joins the others."""

import time

import torch
import torch.distributed as dist

if torch.distributed.is_available() and __import__("os").environ["RANK"] == "1":
    time.sleep(1000)  # at: 1
dist.init_process_group("gloo")  # at: 0 2
