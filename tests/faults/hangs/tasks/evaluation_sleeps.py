"""One rank sleeps in an evaluation."""

# culprits: 1
import time

from base import Fits


class Hangs(Fits):
    def loss(self, model, batch):
        if not model.training and self.is_time("evaluation", 2):
            time.sleep(self.seconds)  # at: 1
        return super().loss(model, batch)
