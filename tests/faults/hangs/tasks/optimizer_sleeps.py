"""A hook of one rank's optimiser sleeps."""

# culprits: 1
import time

from base import Fits


class Hangs(Fits):
    def build_optimizer(self, model):
        optimizer = super().build_optimizer(model)
        optimizer.register_step_pre_hook(self.before_step)
        return optimizer

    def before_step(self, *_):
        if self.is_time("step", 4):
            time.sleep(self.seconds)  # at: 1
