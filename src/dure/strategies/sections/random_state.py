"""Random numbers in a pipeline: those that all stages draw alike, and those that each section draws alone.

All stages call the task's loss on the same batch. Its draws before the call of the model (a mixing factor, noise) must
be the same on all of them, so every stage's generators are kept in the same state. Draws of a section (dropout) come
from a seed of the microbatch and the section, and do not change the generators.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dure.data.randomness import GeneratorStates, kept_global_randomness, seed_draws
from dure.strategies.contract.watch.draws import DrawWatch


class SectionDraws:
    """Random state of this rank's sections."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_seen = False
        """True once a section has drawn in training."""

    @contextmanager
    def of(self, seed: int, section: int, *, in_training: bool) -> Iterator[None]:
        """Seed the generators for a section of a microbatch, and restore all of them afterwards."""
        with kept_global_randomness(self._device):
            seed_draws(self._device, seed, section)
            before = GeneratorStates.now(self._device) if in_training and not self.is_seen else None
            yield
            if before is not None and not GeneratorStates.now(self._device).is_same_as(before):
                self.is_seen = True


class CommonSeeds:
    """Seeds for the draws of sections, drawn from the generator that is in the same state on all stages."""

    def __init__(self) -> None:
        self._begin: Tensor | None = None
        """State of the generator since which only seeds have been drawn."""
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
        """Return whether only seeds have been drawn since the generators were in these states."""
        if self._begin is None or self._state is None or not torch.equal(self._begin, before.of_cpu):
            return False
        devices = [device for device, _ in before.of_devices]
        return GeneratorStates.now(*devices).is_same_as(before._replace(of_cpu=self._state))


class SectionDrawWatch(DrawWatch):
    """Watch over the generators from which seeds for sections are also drawn."""

    def __init__(self, devices: Sequence[torch.device], draws: SectionDraws, seeds: CommonSeeds) -> None:
        super().__init__(devices)
        self._draws = draws
        self._seeds = seeds

    def has_drawn_since(self, before: GeneratorStates) -> bool:
        """Return whether a section has drawn, or anything except the seeds of sections was drawn."""
        return self._draws.is_seen or (super().has_drawn_since(before) and not self._seeds.are_all_since(before))
