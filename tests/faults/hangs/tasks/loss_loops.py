"""The loss of one rank computes for ever."""

# culprits: 1
import time

from base import Fits


class Hangs(Fits):
    def loss(self, model, batch):
        if self.is_time("loss"):
            end = time.monotonic() + self.seconds
            while time.monotonic() < end:  # at: 1
                pass  # at: 1
        return super().loss(model, batch)
