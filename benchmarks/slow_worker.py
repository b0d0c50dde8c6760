"""A task of which one worker takes twice as long: a stand-in for a slower machine."""

import os
import time
from typing import Any

import step_models
import tiny
from torch import Tensor, nn

COMPUTE_SECONDS = 0.010
"""Seconds of sleep in a step, so that two cores are enough for two workers and a server."""


class SlowWorker(tiny.Tiny):
    """The tiny model; worker 1 sleeps twice as long as worker 0."""

    num_samples: int = 8192

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(COMPUTE_SECONDS * (2 if os.environ.get("RANK") == "1" else 1))
        return step_models.loss(model, batch)
