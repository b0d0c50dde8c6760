import random

import numpy as np
import pytest
import torch

from dure.data.randomness import at_epoch, kept_global_randomness, mix, sample_uniform, seed_for_sample


def test_sample_uniform_of_a_sample_does_not_depend_on_its_neighbours():
    with at_epoch(1, 2):
        assert torch.equal(sample_uniform([9, 4, 7], 5)[1], sample_uniform([4], 5)[0])


def test_sample_uniform_looks_uniform_and_uncorrelated():
    draws = sample_uniform(range(50_000), 3)
    counts = torch.histc(draws[:, 0], 20, 0, 1)
    correlation = torch.corrcoef(torch.cat([draws[:-1], draws[1:]], 1).T) - torch.eye(6)
    assert ((counts - 2500) ** 2 / 2500).sum() < 50  # chi-square with 19 degrees of freedom: p = 1e-4
    assert correlation.abs().max() < 0.025  # 5.6 standard deviations


def test_sample_uniform_of_neighbouring_seeds_and_epochs_differs_everywhere():
    seen = set()
    for seed in range(5):
        for epoch in range(5):
            with at_epoch(seed, epoch):
                seen.update(sample_uniform(range(200)).flatten().tolist())
    assert len(seen) == 5 * 5 * 200


def test_sample_uniform_outside_an_epoch_is_seed_zero_epoch_zero():
    with at_epoch(0, 0):
        inside = sample_uniform([3])
    assert torch.equal(sample_uniform([3]), inside)


def test_at_epoch_when_its_body_raises_puts_the_old_position_back():
    before = sample_uniform([1])
    with pytest.raises(ZeroDivisionError, match="zero"), at_epoch(5, 5):
        1 / 0  # noqa: B018
    assert torch.equal(sample_uniform([1]), before)


def test_seed_for_sample_covers_python_numpy_and_torch():
    def draw(index):
        seed_for_sample(1, 2, index)
        return random.random(), np.random.rand(), torch.rand(()).item()

    with kept_global_randomness():
        assert draw(3) == draw(3)
        assert not set(draw(3)) & set(draw(4))


def test_kept_global_randomness_puts_all_three_generators_back():
    def draw():
        with kept_global_randomness():
            return random.random(), np.random.rand(), torch.rand(()).item()

    assert draw() == draw()


def test_mix_spreads_small_numbers_over_64_bits():
    values = {mix(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(values) == 1000
    assert mix(1, 2) != mix(2, 1)
    assert max(values).bit_length() == 64
