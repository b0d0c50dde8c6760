"""Containers of any class keep it, and everything else that they hold, when their tensors change."""

from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from dure.strategies.contract.batches import map_tensors
from dure.strategies.state.containers import are_same, items_of, map_leaves, path_text, tensors_in

X = torch.ones(4, 2)
Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    name: str = "frozen"
    length: int = field(init=False, default=4)


@dataclass
class Checked:
    x: torch.Tensor
    calls: list = field(default_factory=list)

    def __post_init__(self):
        self.calls.append("checked")  # must not happen again


class Output(OrderedDict):
    """A mapping whose items are attributes too, which refuses to be built from nothing (as Hugging Face's outputs)."""

    def __init__(self, x):
        super().__init__(x=x)
        self.__dict__["x"] = x

    def __setitem__(self, key, value):
        if "x" in self.__dict__:
            raise TypeError("frozen")
        super().__setitem__(key, value)


class Encoding(UserDict):
    """Items as attributes, and something beside them (as Hugging Face's batches)."""

    def __init__(self, data, note):
        super().__init__(data)
        self.note = note

    def __getattr__(self, name):
        return self.__dict__["data"][name]


class Noted(list):
    note = "of the class"


class Defined:
    """A class as the `attrs` library makes it, without the library."""

    __attrs_attrs__ = (SimpleNamespace(name="x"),)

    def __init__(self, x):
        self.x = x

    def __setattr__(self, name, value):
        if hasattr(self, name):
            raise AttributeError("frozen")
        super().__setattr__(name, value)


CONTAINERS = {
    "namedtuple": Pair(X, 1),
    "frozen dataclass with slots": Frozen(X),
    "dataclass with __post_init__": Checked(X),
    "mapping with attributes": Output(X),
    "UserDict": Encoding({"x": X, "nested": [X]}, "kept"),
    "UserList": UserList([X]),
    "OrderedDict": OrderedDict(x=X, n=2),
    "defaultdict": defaultdict(list, x=X),
    "deque": deque([X], maxlen=3),
    "list subclass": Noted([X]),
    "torch.return_types": torch.sort(X),
    "mapping proxy": MappingProxyType({"x": X}),
    "namespace": SimpleNamespace(x=X, n=2),
    "attrs": Defined(X),
    "packed": pack_sequence([torch.ones(3, 2), torch.ones(2, 2)]),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_of_other_tensors_has_its_class_and_the_old_one_keeps_its_tensors(kind):
    value = CONTAINERS[kind]
    before = [tensor.dtype for tensor in tensors_in(value)]
    found = map_tensors(value, torch.Tensor.double)
    assert type(found) is type(value)
    assert {tensor.dtype for tensor in tensors_in(found)} == {torch.float64}
    assert [tensor.dtype for tensor in tensors_in(value)] == before
    assert items_of(found).keys() == items_of(value).keys()


def test_attributes_and_items_stay_one_tensor():
    found = map_tensors(Output(X), torch.Tensor.double)
    assert found["x"] is found.x
    encoding = map_tensors(Encoding({"x": X}, "kept"), torch.Tensor.double)
    assert encoding.x is encoding["x"]
    assert encoding.note == "kept"


def test_what_holds_the_rest_of_a_container_is_kept():
    assert map_tensors(CONTAINERS["defaultdict"], torch.Tensor.double)["other"] == []
    assert map_tensors(CONTAINERS["deque"], torch.Tensor.double).maxlen == 3
    assert map_tensors(Frozen(X), torch.Tensor.double).length == 4
    assert map_tensors(Checked(X), torch.Tensor.double).calls == ["checked"]


@pytest.mark.parametrize(
    "value", [Counter("aab"), torch.Size([2]), nn.Linear(1, 1), {"a": (1, "b")}, Frozen, {X}], ids=str
)
def test_a_value_without_tensors_to_change_is_left_alone(value):
    assert map_tensors(value, torch.Tensor.double) is value


def test_one_tensor_in_two_places_is_changed_once():
    changed = []
    found = map_tensors({"x": X, "y": [X]}, lambda tensor: changed.append(tensor) or tensor.double())
    assert found["x"] is found["y"][0]
    assert len(changed) == 1


def test_tensors_are_found_in_objects_of_unknown_classes():
    class Cache:
        def __init__(self):
            self.layers = [SimpleNamespace(key=X)]
            self.model = nn.Linear(1, 1)

    assert [id(tensor) for tensor in tensors_in([Cache()])] == [id(X)]


def test_same_compares_contents_and_not_tensors():
    assert are_same({"a": [1, X]}, {"a": [1, X]})
    assert not are_same({"a": [1, X]}, {"a": [1, X.clone()]})
    assert not are_same([1], [2])
    assert not are_same([1], (1,))


def test_long_containers_are_looked_into_unless_all_they_hold_is_plain():
    words = {str(index): index for index in range(100)}
    held = [*words, X]
    assert map_leaves(words, lambda leaf: leaf) is words
    copied = map_leaves([words], lambda leaf: leaf, copies=True)
    assert copied == [words]
    assert copied[0] is not words
    assert map_tensors(held, torch.Tensor.double)[-1].dtype == torch.float64
    assert [id(tensor) for tensor in tensors_in([words, held])] == [id(X)]


def test_a_path_reads_as_the_expression_for_its_value():
    assert path_text((("attribute", "data"), ("item", "x"), ("item", 0)), "batch") == "batch.data['x'][0]"


def test_a_packed_sequence_stays_one():
    assert isinstance(map_tensors(CONTAINERS["packed"], torch.clone), PackedSequence)
