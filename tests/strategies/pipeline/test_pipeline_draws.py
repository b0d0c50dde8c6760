"""Seeds of sections, told from what the task's code draws."""

import torch

from dure.data.randomness import GeneratorStates, kept_global_randomness
from dure.strategies.sections.random_state import CommonSeeds


def test_seeds_when_nothing_else_is_drawn_then_they_are_all():
    seeds = CommonSeeds()
    with kept_global_randomness():
        seeds.draw()  # as a rehearsal does
    before = GeneratorStates.now()
    assert len({seeds.draw() for _ in range(3)}) == 3
    assert seeds.are_all_since(before)


def test_seeds_when_the_task_draws_between_or_after_them_then_they_are_not_all():
    for num_seeds in (0, 1):
        seeds, before = CommonSeeds(), GeneratorStates.now()
        seeds.draw()
        torch.rand(1)
        for _ in range(num_seeds):
            seeds.draw()
        assert not seeds.are_all_since(before)
