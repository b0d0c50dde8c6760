"""Detection of samples that loader processes read in another way than this process does later."""

import time

import pytest
import torch
from torch.utils.data import Dataset

from dure.training.session.loader import Loader, SampleFetch
from dure.training.session.loader_copies import LoaderCopies
from dure.training.session.sample_order import SampleOrder


class Dicts(Dataset):
    """Samples in dictionaries, scaled by a factor."""

    factor = 1.0
    seconds = 0.0

    def __init__(self):
        self.held = [{"x": torch.ones(2) * index} for index in range(16)]

    def __len__(self):
        return len(self.held)

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return {**self.held[index], "factor": self.factor, "read_at": time.perf_counter()}


class Clock(Dicts):
    """Samples that differ each time."""

    def __getitem__(self, index):
        return {"x": torch.tensor(time.perf_counter()), "factor": self.factor}


class Held(Dicts):
    """Dictionaries themselves, to which their users may add."""

    def __getitem__(self, index):
        return self.held[index]


def collated(samples):
    for sample in samples:
        sample["sum"] = sample["x"].sum()
    return torch.stack([sample["x"] * sample.get("factor", 1.0) for sample in samples])


def copies_of(data, num_workers=1):
    loader = Loader(SampleFetch(data, collated, 3), torch.device("cpu"), num_workers)
    return LoaderCopies(loader, SampleOrder(len(data), 4, seed=3), {})


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_that_follow_state_of_the_data_differ_once_it_is_set(num_workers):
    data = Dicts()
    copies = copies_of(data, num_workers)
    assert not copies.differ()
    data.factor = 2.0
    assert [copies.differ(), copies.differ()] == [num_workers > 0, False]


def test_samples_that_hold_more_after_they_were_collated_are_the_same():
    data = Held()
    copies = copies_of(data)
    collated(data.held)
    data.held[0]["note"] = "read"
    assert not copies.differ()


def test_samples_that_differ_each_time_are_not_compared():
    assert not copies_of(Clock()).differ()


def test_slow_samples_are_not_read_again():
    data = Dicts()
    data.seconds = 0.3
    copies = copies_of(data)
    started = time.monotonic()
    data.factor = 2.0
    assert not copies.differ()
    assert time.monotonic() - started < 0.1
