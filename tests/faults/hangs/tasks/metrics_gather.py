"""One rank gathers in its loss, and nobody else does."""

# culprits: 0 1
import time

import torch
import torch.distributed as dist
from base import Fits


class Hangs(Fits):
    def loss(self, model, batch):
        if self.is_time("loss"):
            if self.is_slow:
                time.sleep(self.seconds)  # slow: 1
            else:
                dist.all_gather([torch.ones(3) for _ in range(2)], torch.ones(3))  # at: 1
        return super().loss(model, batch)
