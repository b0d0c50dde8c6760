import os
import random

import numpy as np
import pytest
import torch

from dure.data.randomness import kept_global_randomness
from dure.errors import TaskInvalid
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


@pytest.fixture
def on_devices(monkeypatch):
    """Give generators to two devices that are not there."""
    generators = {torch.device("cuda", number): torch.Generator().manual_seed(number) for number in (2, 5)}
    seeds._generators.cache_clear()
    monkeypatch.setattr(seeds, "default_generator", generators.__getitem__)
    monkeypatch.setattr("dure.data.randomness.default_generator", generators.__getitem__)
    yield generators
    seeds._generators.cache_clear()


def drawn(generator):
    return torch.rand(2, generator=generator).tolist()


def test_random_state_holds_the_generator_of_every_device_of_the_process_by_its_number_there(on_devices):
    first, second = on_devices
    state = {name: t.clone() for name, t in seeds.capture_random_state((second, second, first)).items()}
    assert {"cuda0", "cuda1"} <= state.keys()
    before = [drawn(on_devices[device]) for device in (second, first)]
    # the next start may give other devices, in the same order
    seeds.restore_random_state(state, (first, second, torch.device("cpu")))
    assert [drawn(on_devices[device]) for device in (first, second)] == before


def test_random_state_of_an_older_checkpoint_is_that_of_the_first_device(on_devices):
    first, second = on_devices
    state = dict(seeds.capture_random_state((first, second)))
    state["cuda"] = state.pop("cuda0").clone()
    del state["cuda1"]
    expected, other = drawn(on_devices[first]), drawn(on_devices[second])
    seeds.restore_random_state(state, (first, second))
    assert drawn(on_devices[first]) == expected
    assert drawn(on_devices[second]) != other


def test_kept_randomness_is_that_of_the_devices_too(on_devices):
    with kept_global_randomness(*on_devices, torch.device("cpu")):
        inside = [drawn(generator) for generator in on_devices.values()]
    assert [drawn(generator) for generator in on_devices.values()] == inside


@pytest.mark.parametrize("num_draws", range(5))
def test_numpys_state_when_captured_again_and_again_is_the_one_that_numpy_tells(num_draws):
    np.random.seed(3)
    for _ in range(num_draws):
        seeds.capture_random_state()
        np.random.normal()  # in pairs: every other one is given out without a draw
        state = seeds.capture_random_state()
        _, keys, *rest = np.random.get_state()
        assert state["numpy_keys"].tolist() == keys.tolist()
        assert state["numpy_rest"].tolist() == rest


def test_numpys_generator_when_it_is_another_one_is_refused():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(TaskInvalid, match="numpy's global generator is PCG64, whose state no checkpoint keeps"):
            seeds.capture_random_state()
    finally:
        np.random.set_bit_generator(before)


def test_algorithms_chosen_by_timing_are_declared_of_a_run_that_goes_on(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    (text,) = seeds.chosen_by_timing("cuda", 5)
    assert text.startswith("the bits of convolutions after a resume or restart")
    assert seeds.chosen_by_timing("cuda", 0) == seeds.chosen_by_timing("cpu", 5) == []
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    assert seeds.chosen_by_timing("cuda", 5) == []
