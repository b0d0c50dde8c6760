"""Random numbers in a pipeline: what all stages draw alike, and what each section draws for itself.

All stages call the task's loss on the same batch, so what it draws before it calls the model (a mixing factor, noise)
must come out the same on all of them: every stage's generators are kept in the same state. What a section draws
(dropout) comes from a seed of the microbatch and the section, and leaves the generators as they were.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dure.data.randomness import GeneratorStates, kept_global_randomness, seed_draws
from dure.strategies.contract.watch.draws import DrawWatch


class SectionDraws:
    """Draws of this rank's sections."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_seen = False
        """True once a section has drawn in training."""

    @contextmanager
    def of(self, seed: int, section: int, *, in_training: bool) -> Iterator[None]:
        """Draw what belongs to a section of a microbatch, and put all generators back as they were."""
        with kept_global_randomness(self._device):
            seed_draws(self._device, seed, section)
            before = GeneratorStates.now(self._device) if in_training and not self.is_seen else None
            yield
            if before is not None and not GeneratorStates.now(self._device).is_same_as(before):
                self.is_seen = True


class CommonSeeds:
    """Seeds for the draws of sections, drawn from the generator that all stages have in the same state."""

    def __init__(self) -> None:
        self._begin: Tensor | None = None
        """State of the generator since which nothing but seeds has been drawn."""
        self._state: Tensor | None = None
        """State of the generator after the last seed."""

    def draw(self) -> int:
        """Draw the next seed."""
        now = torch.default_generator.get_state()
        if self._state is None or not torch.equal(now, self._state):
            self._begin = now
        seed = int(torch.randint(2**62, ()))
        self._state = torch.default_generator.get_state()
        return seed

    def are_all_since(self, before: GeneratorStates) -> bool:
        """Return whether nothing but seeds has been drawn since the generators were in these states."""
        if self._begin is None or self._state is None or not torch.equal(self._begin, before.of_cpu):
            return False
        return GeneratorStates.now().is_same_as(before._replace(of_cpu=self._state, of_devices=()))


class SectionDrawWatch(DrawWatch):
    """Watch over the generators where seeds for sections are drawn from them too."""

    def __init__(self, devices: Sequence[torch.device], draws: SectionDraws, seeds: CommonSeeds) -> None:
        super().__init__(devices)
        self._draws = draws
        self._seeds = seeds

    def has_drawn_since(self, before: GeneratorStates) -> bool:
        """Return whether a section has drawn, or anything but the seeds of sections has been drawn."""
        return self._draws.is_seen or (super().has_drawn_since(before) and not self._seeds.are_all_since(before))
