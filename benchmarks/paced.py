"""The tiny model in steps of about 20 ms."""

import time
from typing import Any

from recovery_by_hand import PAUSE_SECONDS
from tiny import Tiny
from torch import Tensor, nn


class Paced(Tiny):
    """Waits before each batch."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(PAUSE_SECONDS)
        return super().loss(model, batch)
