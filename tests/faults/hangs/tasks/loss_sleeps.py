"""The loss of one rank sleeps."""

# culprits: 1
import time

from base import Fits


class Hangs(Fits):
    def loss(self, model, batch):
        if self.is_time("loss"):
            time.sleep(self.seconds)  # at: 1
        return super().loss(model, batch)
