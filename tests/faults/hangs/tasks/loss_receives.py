"""One rank receives in its loss what nobody sends."""

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
                dist.recv(torch.ones(3), src=0)  # at: 1
        return super().loss(model, batch)
