"""Random numbers in a pipeline: what all stages draw alike, and what each section draws for itself.

All stages call the task's loss on the same batch, so what it draws before it calls the model (a mixing factor, noise)
must come out the same on all of them: every stage's generators are kept in the same state. What a section draws
(dropout) comes from a seed of the microbatch and the section, and leaves the generators as they were.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dure.data.randomness import kept_global_randomness, seed_draws


@contextmanager
def drawing_from(device: torch.device, seed: int, section: int) -> Iterator[None]:
    """Draw what belongs to a section of a microbatch, and put all generators back as they were."""
    with kept_global_randomness(device):
        seed_draws(device, seed, section)
        yield


def common_seed() -> int:
    """Draw a seed from the generator that all stages have in the same state."""
    return int(torch.randint(2**62, ()))
