from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from dure.errors import TaskInvalid
from dure.strategies.contract.batch_layout import layout_of
from dure.strategies.contract.batches import Microbatch, RowWatch, map_tensors, split_batch, to_device
from dure.strategies.data_parallel.balanced_dp import UnevenParts
from dure.strategies.data_parallel.device_shares import fractions_of
from tests.specs import spec_of

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


class Graph:
    """Moves itself, in place, as objects of PyTorch Geometric do."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        self.x = self.x.to(device)
        return self


def test_an_object_moves_by_its_own_method_and_the_one_that_is_given_stays():
    given_graph = Graph(numbers(2))
    moved = to_device({"graph": given_graph, "packed": pack_sequence([torch.ones(2, 1)])}, torch.device("meta"))
    assert moved["graph"].x.device.type == "meta"
    assert given_graph.x.device.type == "cpu"
    assert moved["packed"].data.device.type == "meta"
    assert moved["packed"].batch_sizes.device.type == "cpu"  # where torch wants them


@pytest.mark.parametrize(("device", "later"), [("cpu", False), ("meta", True)])
def test_what_is_moved_to_the_host_has_arrived(device, later, monkeypatch):
    asked = []

    class Graph:
        def to(self, device, non_blocking=False):
            asked.append(non_blocking)

    real = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *a, **named: (asked.append(named), real(self, *a, **named))[1])
    to_device([torch.ones(2), Graph()], torch.device(device))
    assert asked == [{"non_blocking": later}, later]


def test_moving_to_where_all_is_gives_the_batch_itself():
    batch = {"x": numbers(2), "rest": [1, "a"]}
    assert to_device(batch, torch.device("cpu")) is batch


class Encoding(UserDict):
    def __getattr__(self, name):
        return self.__dict__["data"][name]


def test_split_keeps_the_class_of_every_container():
    batch = Encoding({"ids": numbers(3), "record": Batch(numbers(3)), "texts": tuple("abc")})
    parts = split_batch(batch, [1, 2])
    assert [type(part) for part in parts] == [Encoding, Encoding]
    assert [len(part.ids) for part in parts] == [1, 2]
    assert [len(part.record.x) for part in parts] == [1, 2]
    assert [part.texts for part in parts] == [("a",), ("b", "c")]


def test_split_of_a_list_with_a_tensor_for_each_sample_is_by_position():
    images = [torch.ones(3, n, n) for n in (4, 5)]
    parts = split_batch({"images": images, "boxes": [{"box": torch.ones(2, 4)}, {"box": torch.ones(1, 4)}]}, [1, 1])
    assert [[image.shape[1] for image in part["images"]] for part in parts] == [[4], [5]]
    assert [[len(boxes["box"]) for boxes in part["boxes"]] for part in parts] == [[2], [1]]


def test_split_of_arrays_sparse_and_nested_tensors_is_by_rows():
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2), torch.ones(3)], layout=torch.jagged)
    parts = split_batch({"a": np.arange(3), "s": torch.eye(3).to_sparse(), "n": nested}, [2, 1])
    assert [part["a"].tolist() for part in parts] == [[0, 1], [2]]
    assert [part["s"].to_dense().argmax(1).tolist() for part in parts] == [[0, 1], [2]]
    assert [[len(row) for row in part["n"].unbind()] for part in parts] == [[1, 2], [3]]


class Unknown:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize(
    "value", [Unknown(numbers(3)), pack_sequence([torch.ones(3, 1), torch.ones(1, 1)]), {numbers(3)}]
)
def test_split_of_an_object_that_holds_tensors_in_an_unknown_way_is_refused(value):
    with pytest.raises(TaskInvalid, match=rf"batch\['x'\] is a {type(value).__name__}, which holds tensors in a way"):
        split_batch({"x": value}, [2, 1])


def test_what_a_part_changes_in_place_is_changed_in_the_batch():
    batch = numbers(3).float()
    for part in split_batch(batch, [1, 2]):
        part.mul_(2)
    assert torch.equal(batch, 2 * numbers(3))


# two batches show what is of the samples


def example(n, **extra):
    """Return a batch of the first samples of some data, two numbers in each."""
    lengths = [1, 3, 2, 5, 4][:n]
    return {
        "x": numbers(n),
        "weights": torch.arange(4.0),
        "images": [torch.ones(4, length) for length in lengths],
        **{name: value(n) for name, value in extra.items()},
    }


def layout(**extra):
    return layout_of([(n, example(n, **extra)) for n in (2, 3)])


def test_a_tensor_that_is_as_long_as_the_batch_by_accident_goes_to_every_part():
    parts = split_batch(example(4), [1, 3], layout())
    assert [len(part["weights"]) for part in parts] == [4, 4]
    assert [len(part["x"]) for part in parts] == [1, 3]


def test_a_list_of_a_tensor_for_each_sample_is_known_whatever_their_sizes():
    parts = split_batch(example(4), [1, 3], layout())  # four rows in each image, and four samples
    assert [len(part["images"]) for part in parts] == [1, 3]


@pytest.mark.parametrize(
    "value",
    [
        lambda n: n,
        lambda n: torch.tensor(float(n)),
        lambda n: numbers(n).float().mean(0),
        lambda n: torch.ones(5, n),
        lambda n: {str(i): i for i in range(n)},
        lambda n: [torch.ones(4)] * (2 * n),
    ],
    ids=["number", "scalar", "statistic", "samples second", "key by sample", "two by sample"],
)
def test_what_is_made_of_all_samples_together_is_refused(value):
    with pytest.raises(TaskInvalid, match=r"extra'\]"):
        split_batch(example(5, extra=value), [2, 3], layout(extra=value))


@pytest.mark.parametrize(
    "value", [7, 0.5, "text", None, torch.tensor(2.0), torch.ones(3), float("nan"), (2, 2)], ids=str
)
def test_what_is_the_same_in_both_batches_goes_to_every_part(value):
    parts = split_batch(example(3, extra=lambda n: value), [1, 2], layout(extra=lambda n: value))
    assert all(part["extra"] is value or part["extra"] == value for part in parts)


@given(microbatch_size=st.integers(1, 300), first=st.floats(0, 1), devices=st.integers(2, 8))
def test_no_device_gets_more_than_its_microbatch(microbatch_size, first, devices):
    parts = UnevenParts(spec_of("balanced_dp"), 1)
    parts.fractions = fractions_of(devices, first)
    assert max(parts.divided(parts.process_size(microbatch_size))) <= microbatch_size


@pytest.mark.parametrize(
    ("rows", "difference"),
    [
        ([4, 4, 3, 4], "a batch of 4 samples had 3 rows"),
        ([4, 4, 4], None),
        ([9, 4, 7], None),  # rows of another kind, such as words
    ],
)
def test_rows_when_one_batch_has_others_than_most_are_told(rows, difference):
    watch = RowWatch()
    for number in rows:
        watch.see(Microbatch({"x": torch.ones(number, 2), "scale": torch.tensor(1.0)}, 4))
    assert watch.difference == difference


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_rows_of_nested_tensors_are_counted():
    watch = RowWatch()
    for number in [4, 4, 3]:
        watch.see(Microbatch((torch.nested.nested_tensor([torch.ones(2)] * number), torch.ones(number)), 4))
    assert watch.difference == "a batch of 4 samples had 3 rows"
