"""The loss of one rank sleeps in native code that keeps Python's lock."""

# culprits: 1
import ctypes

from base import Fits


class Hangs(Fits):
    def loss(self, model, batch):
        if self.is_time("loss"):
            assert ctypes.PyDLL(None).sleep(self.seconds) == 0  # at: 1
        return super().loss(model, batch)
