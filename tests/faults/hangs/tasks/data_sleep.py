"""The data of one rank are slow to come."""

# culprits: 1
import time

import torch
from base import Fits


class Hangs(Fits):
    def train_data(self):
        data = super().train_data()
        task = self

        class Slow(torch.utils.data.Dataset):
            def __len__(self):
                return len(data)

            def __getitem__(self, index):
                if task.is_time("sample", 20):
                    time.sleep(task.seconds)  # at: 1
                return data[index]

        return Slow()
