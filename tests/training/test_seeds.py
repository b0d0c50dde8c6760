import os
import random

import numpy as np
import pytest
import torch

from dure.training import seeds


@pytest.fixture(autouse=True)
def keeps_the_generators():
    state = seeds.capture_random_state()
    yield
    seeds.restore_random_state(state)


def draws():
    return random.random(), random.gauss(0, 1), np.random.random(), np.random.normal(), torch.rand(3).tolist()


def test_a_seed_covers_python_numpy_and_torch():
    seeds.seed_everything(2**63 - 1)
    first = draws()
    seeds.seed_everything(2**63 - 1)
    assert draws() == first
    seeds.seed_everything(5)
    assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_ranks_draw_differently_and_repeatably():
    by_rank = []
    for rank in (0, 1, 2, 0):
        seeds.seed_rank(2**63 - 1, rank)
        by_rank.append(draws())
    assert by_rank[0] == by_rank[3]
    assert len({by_rank[rank][0] for rank in range(3)}) == 3


@pytest.mark.parametrize("drawn_before", [0, 1], ids=["fresh", "half of a pair of normals drawn"])
def test_random_state_goes_through_tensors_and_back(drawn_before):
    seeds.seed_everything(4)
    for _ in range(drawn_before):
        draws()
    state = {name: tensor.clone() for name, tensor in seeds.capture_random_state().items()}
    expected = draws()
    draws()
    seeds.restore_random_state(state)
    assert draws() == expected


def test_deterministic_asks_torch_for_it(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    try:
        seeds.make_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
