"""Watch over the global random number generators."""

from collections.abc import Sequence

import torch

from dure.data.randomness import GeneratorStates


class DrawWatch:
    """Watch over the generators from which code of the task draws."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices

    def has_drawn_since(self, before: GeneratorStates) -> bool:
        """Return whether code of the task has drawn from the generators since they were in these states."""
        return not before.is_same_as(GeneratorStates.now(*self._devices))
