"""A process that loads data for one rank is killed."""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Data(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if dist.get_rank() == 1 and index == 20:
            time.sleep(1)  # until rank 1 waits for it: torch raises wherever the rank is when a loader process dies
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(4)


dist.init_process_group("gloo")
for batch in DataLoader(Data(), batch_size=4, num_workers=1):  # at: 1
    dist.all_reduce(batch)
