from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.errors import TaskInvalid
from dure.measure.shares import shares
from dure.strategies.balanced_dp import BalancedDataParallel
from dure.strategies.batches import map_tensors, split_batch, to_device

Pair = namedtuple("Pair", "x y")


@dataclass
class Batch:
    x: torch.Tensor
    name: str = "batch"


def numbers(n):
    return torch.arange(2 * n).view(n, 2)


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(sum))
def test_split_parts_joined_again_are_the_batch(counts):
    n = sum(counts)
    batch = {"x": numbers(n), "ids": [str(i) for i in range(n)], "pair": (numbers(n), Pair(numbers(n), 7))}
    parts = split_batch(batch, counts)
    assert [len(part["x"]) for part in parts] == counts
    assert torch.equal(torch.cat([part["x"] for part in parts]), numbers(n))
    assert torch.equal(torch.cat([part["pair"][1].x for part in parts]), numbers(n))
    assert [name for part in parts for name in part["ids"]] == batch["ids"]
    assert all(part["pair"][1].y == 7 for part in parts)


def test_split_gives_scalars_and_text_to_every_part_and_keeps_dataclasses():
    parts = split_batch([torch.tensor(0.5), Batch(numbers(3))], [1, 2])
    assert [part[0].item() for part in parts] == [0.5, 0.5]
    assert [len(part[1].x) for part in parts] == [1, 2]
    assert {part[1].name for part in parts} == {"batch"}


def test_split_of_a_list_of_tensors_splits_each_of_them():
    parts = split_batch([numbers(2), numbers(2)], [1, 1])
    assert [[len(tensor) for tensor in part] for part in parts] == [[1, 1], [1, 1]]


def test_split_of_a_tensor_without_the_samples_first_is_refused():
    with pytest.raises(TaskInvalid, match=r"a batch of 3 samples holds a tensor of shape \(2, 3\): to divide a batch"):
        split_batch({"x": torch.zeros(2, 3)}, [2, 1])


def test_moving_a_batch_keeps_its_structure():
    batch = {"x": numbers(2), "pair": Pair(numbers(1), "y"), "record": Batch(numbers(1)), "plain": [1, None]}
    moved = to_device(batch, torch.device("meta"))
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].y == "y"
    assert moved["plain"] == [1, None]
    assert {moved["x"].device.type, moved["pair"].x.device.type, moved["record"].x.device.type} == {"meta"}
    assert map_tensors((1, [torch.tensor(2)]), lambda tensor: tensor.item()) == (1, [2])


@given(microbatch_size=st.integers(1, 300), first=st.floats(0, 1), devices=st.integers(2, 8))
def test_no_device_gets_more_than_its_microbatch(microbatch_size, first, devices):
    strategy = BalancedDataParallel.__new__(BalancedDataParallel)
    strategy.devices = (torch.device("cpu"),) * devices
    strategy.fractions = strategy._fractions(first)
    together = strategy.process_microbatch_size(microbatch_size)
    assert max(shares(together, devices, strategy.fractions)) <= microbatch_size
