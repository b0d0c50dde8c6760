"""Seeds that sections draw from, told from the draws of a task."""

import pytest
import torch

from dure.data import randomness
from dure.data.randomness import GeneratorStates
from dure.strategies.sections.random_state import CommonSeeds, SectionDraws, SectionDrawWatch

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def generator(monkeypatch):
    """Return the generator of a device that is not here."""
    made = torch.Generator()
    monkeypatch.setattr(randomness, "default_generator", lambda device: made)
    return made


@pytest.mark.parametrize("draws_on", ["nothing", "the CPU", "the device"])
def test_draws_of_a_task_on_any_generator_are_seen_among_those_of_seeds(draws_on, generator):
    seeds = CommonSeeds()
    watch = SectionDrawWatch([DEVICE], SectionDraws(DEVICE), seeds)
    before = GeneratorStates.now(DEVICE)
    seeds.draw()
    if draws_on == "the device":
        torch.rand((), generator=generator)
    if draws_on == "the CPU":
        torch.rand(())
    assert watch.has_drawn_since(before) is (draws_on != "nothing")
