"""Batches of several ranks, joined for one process."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from dure.scripts.prove.feeding import Batches, join, shaped
from dure.scripts.prove.recording import CannotJoin, Fetch, Loader, Recording, plain_batch, recording_path, save

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sentences:
    tokens: torch.Tensor
    language: str = "ko"


ONES, TWOS = torch.ones(2, 3), torch.full((4, 3), 2.0)


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    ("batches", "joined"),
    [
        ([ONES, TWOS], torch.cat([ONES, TWOS])),
        ([(ONES, ONES), (TWOS, TWOS)], (torch.cat([ONES, TWOS]),) * 2),
        (
            [{"x": ONES, "ids": ["a", "b"]}, {"x": TWOS, "ids": [*"cdef"]}],
            {"x": torch.cat([ONES, TWOS]), "ids": [*"abcdef"]},
        ),
        ([ONES.T, TWOS.T], torch.cat([ONES.T, TWOS.T], 1)),  # time first
        ([(torch.ones(9, 1), torch.ones(7, 1)), tuple(torch.ones(5, 1) for _ in range(4))], None),  # an item a sample
        ([{"x": ONES, "scale": 2.0}, {"x": TWOS, "scale": 2.0}], {"x": torch.cat([ONES, TWOS]), "scale": 2.0}),
    ],
)
def test_batches_when_they_fit_then_are_one_batch_of_all_samples(batches: list[Any], joined: Any) -> None:
    found = join(batches, [2, 4])
    if joined is None:
        assert [len(each) for each in found] == [9, 7, 5, 5, 5, 5]
    else:
        assert is_same(found, joined)


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([torch.ones(2, 3), torch.ones(4, 5)], r"tensors of shapes \(2, 3\), \(4, 5\) for 2, 4 samples"),
        ([torch.tensor(1.0), torch.tensor(2.0)], "single numbers, which are not the same"),
        ([{"a": 1}, {"b": 1}], "other keys on each rank"),
        ([{"a": 1}, {"a": 2}], "values of int, which are not the same"),
    ],
)
def test_batches_when_they_do_not_fit_then_cannot_be_joined(batches: list[Any], said: str) -> None:
    with pytest.raises(CannotJoin, match=said):
        join(batches, [2, 4])


def test_batch_when_it_is_kept_and_shaped_again_then_has_its_containers() -> None:
    batch = UserDict({"pair": Pair(ONES, np.ones(2)), "name": "a", "sentences": Sentences(ONES)})
    kept = plain_batch(batch)
    assert type(kept) is dict
    assert isinstance(kept["pair"][1], torch.Tensor)
    again = shaped(batch, kept)
    assert type(again) is UserDict
    assert type(again["pair"]) is Pair
    assert isinstance(again["pair"].y, np.ndarray)
    assert type(again["sentences"]) is Sentences
    with pytest.raises(CannotJoin, match="batches with objects of object"):
        plain_batch([object()])


def recordings(folder: Any, *, rank_1_has_its_batch: bool) -> Batches:
    for rank in range(2):
        loader = Loader(key="train.py:3 0", line="train.py:3", num_samples=4, sampler="S", is_shuffled=None)
        fetch = Fetch(loader=0, epoch=0, position=0, has_gradients=True, samples=[rank, 2 + rank], size=2)
        if rank == 0 or rank_1_has_its_batch:
            fetch.batch = torch.full((2, 1), float(rank))
        end = Fetch(loader=0, epoch=0, position=1, has_gradients=True)
        one = Recording(rank=rank, world_size=2, seed=rank, loaders=[loader], fetches=[fetch, end])
        one.problems += [] if rank == 0 else ["batches with objects of Graph"]
        save(one, recording_path(folder, rank))
    return Batches(folder)


def test_fetch_when_both_ranks_have_a_batch_then_gives_the_samples_of_both_and_then_ends(tmp_path: Any) -> None:
    batches = recordings(tmp_path, rank_1_has_its_batch=True)
    assert (batches.seed, batches.number_of("train.py:3 0", ()), batches.number_of("other 0", {0})) == (0, 0, 1)
    wanted = Fetch(loader=0, epoch=0, position=0, has_gradients=True)
    assert batches.joined(wanted).flatten().tolist() == [0.0, 0.0, 1.0, 1.0]
    assert (wanted.samples, wanted.size) == ([0, 2, 1, 3], 4)
    with pytest.raises(StopIteration, match=r"^$"):
        batches.joined(Fetch(loader=0, epoch=0, position=1, has_gradients=True))


def test_fetch_when_a_batch_of_one_rank_could_not_be_kept_then_the_others_are_not_taken_for_all(tmp_path: Any) -> None:
    batches = recordings(tmp_path, rank_1_has_its_batch=False)
    with pytest.raises(CannotJoin, match="batches with objects of Graph"):
        batches.joined(Fetch(loader=0, epoch=0, position=0, has_gradients=True))
