"""The loss of one rank waits for a lock."""

# culprits: 1
import threading

from base import Fits


class Hangs(Fits):
    def loss(self, model, batch):
        if self.is_time("loss"):
            lock = threading.Lock()
            lock.acquire()
            lock.acquire(timeout=self.seconds)  # at: 1
        return super().loss(model, batch)
