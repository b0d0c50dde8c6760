"""The data of one rank are slow to come, in a loader process."""

# culprits: 1
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Data(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        if dist.get_rank() == 1 and index == 20:
            time.sleep(seconds)
        return torch.ones(3)


is_slow = "slow" in sys.argv
seconds = 5 if is_slow else 1000
dist.init_process_group("gloo")
rank = dist.get_rank()
ones = torch.ones(3)
for batch in DataLoader(Data(), batch_size=4, num_workers=1):  # at: 1
    dist.all_reduce(batch)  # at: 0 2
