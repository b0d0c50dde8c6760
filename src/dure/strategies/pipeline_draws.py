"""Random numbers in a pipeline: what all stages draw alike, and what each section draws for itself.

All stages call the task's loss on the same batch, so what it draws before it calls the model (a mixing factor, noise)
must come out the same on all of them: every stage's generators are kept in the same state. What a section draws
(dropout) comes from a seed of the microbatch and the section, and leaves the generators as they were.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dure.data.randomness import mix, seed_for_sample
from dure.torchcompat import default_generator


class GeneratorStates(NamedTuple):
    """The states of Python's, NumPy's and torch's generators."""

    of_python: Any
    of_numpy: Any
    of_cpu: Tensor
    of_device: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> "GeneratorStates":
        """Return the states of this moment, a device's own included."""
        own = None if device.type == "cpu" else default_generator(device).get_state()
        return cls(random.getstate(), np.random.get_state(), torch.default_generator.get_state(), own)

    def put_back(self, device: torch.device) -> None:
        """Bring the generators into these states."""
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)
        torch.default_generator.set_state(self.of_cpu)
        if self.of_device is not None:
            default_generator(device).set_state(self.of_device)


@contextmanager
def kept_draws(device: torch.device) -> Iterator[None]:
    """Put all generators back as they were."""
    before = GeneratorStates.now(device)
    try:
        yield
    finally:
        before.put_back(device)


@contextmanager
def drawing_from(device: torch.device, seed: int, section: int) -> Iterator[None]:
    """Draw what belongs to a section of a microbatch, and put all generators back as they were."""
    with kept_draws(device):
        seed_draws(device, seed, section)
        yield


def seed_draws(device: torch.device, seed: int, number: int) -> None:
    """Seed all generators that code on a device draws from, for one of several things that draw for themselves."""
    seed_for_sample(seed, number, 0)
    if device.type != "cpu":
        default_generator(device).manual_seed(mix(seed, number) >> 1)


def common_seed() -> int:
    """Draw a seed from the generator that all stages have in the same state."""
    return int(torch.randint(2**62, ()))
