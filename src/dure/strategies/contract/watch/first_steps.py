"""Watch over the optimiser's first steps, which must be the same on all ranks."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from dure.data.randomness import GeneratorStates
from dure.strategies.contract.watch.own_collectives import watched_collectives

_WATCHED_STEPS = 3
"""Steps of the optimiser in which random numbers and collectives are detected."""


class StepFindings(NamedTuple):
    """Findings in one step."""

    draws: bool = False
    """True if the optimiser drew random numbers."""
    reduced: str | None = None
    """Name of a reduction that its step called itself."""


class FirstSteps:
    """Watch over the first steps of the optimiser."""

    def __init__(self, devices: Sequence[torch.device], *, has_other_ranks: bool) -> None:
        self._devices = devices
        self._num_left = _WATCHED_STEPS
        self.has_drawn = False
        """True if the optimiser drew random numbers in any of them."""
        self.is_over = not has_other_ranks
        """True if later steps are not watched."""

    def take(self, optimizer: Optimizer, step: Callable[[Optimizer], None]) -> StepFindings:
        """Take a step, and examine it if it is among the first."""
        self._num_left -= 1
        self.is_over = not self._num_left
        before = GeneratorStates.now(*self._devices)
        called: list[str] = []
        with watched_collectives(optimizer, called):
            step(optimizer)
        draws = not before.is_same_as(GeneratorStates.now(*self._devices))
        self.has_drawn = self.has_drawn or draws
        return StepFindings(draws, called[0] if called else None)
