"""Nested state through JSON: everything comes back, of the same type, to the bit."""

import json
import math
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum
from typing import NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.training.checkpoints.state_tree import NamedTensors, decode, encode, tensor_names

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers() | st.booleans()
trees = st.recursive(
    leaves,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
)


@given(trees)
def test_tree_when_decoded_is_what_was_encoded(tree):
    found = decode(json.loads(json.dumps(encode(tree, "tree"), allow_nan=False)))
    assert found == tree
    assert repr(found) == repr(tree)


@pytest.mark.parametrize("tree", [{"$float": "inf"}, {"$tensor": "x"}, {"a": {"$pairs": []}}, {"$": 1}])
def test_tree_when_its_keys_look_like_marks_is_not_mistaken(tree):
    assert decode(encode(tree, "tree")) == tree


def test_tensors_when_their_places_read_the_same_get_names_of_their_own():
    tensors = NamedTensors()
    tree = {"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.zeros(1)}, "list": [torch.full((1,), 2.0)]}
    data = encode(tree, "state", tensors)
    assert sorted(tensors) == ["state.a.b.c", "state.a.b.c~2", "state.list.0"]
    assert [decode(data, tensors.__getitem__)[k][i].item() for k, i in (("a", "b.c"), ("a.b", "c"), ("list", 0))] == [
        1, 0, 2,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        numpy.float32(0.1), numpy.float64("-inf"), numpy.float16(0.1), numpy.int64(3), numpy.uint8(255), numpy.bool_(1),
        OrderedDict(b=1, a=[2]), OrderedDict([(1, {"x": ()})]), torch.Size([2, 3]), torch.bfloat16, True, 1, 1.0,
        -0.0, 2**70, "\u0000", (), [()], {(1, "a"): None},
    ],
    ids=repr,
)  # fmt: skip
def test_value_when_decoded_is_of_its_own_type(value):
    found = decode(json.loads(json.dumps(encode(value, "x"), allow_nan=False)))
    assert type(found) is type(value)
    assert repr(found) == repr(value)
    assert math.isnan(decode(encode(math.nan, "x")))


def test_tensor_when_it_stands_in_several_places_has_one_name():
    tensors, one = NamedTensors(), torch.ones(2)
    data = encode({"a": one, "b": [one.detach(), torch.ones(2)]}, "x", tensors)
    assert tensor_names(data) == {*tensors} == {"x.a", "x.b.1"}


class Word(str):
    pass


class Level(IntEnum):
    LOW = 1


class Pair(NamedTuple):
    first: int
    second: int


@pytest.mark.parametrize(
    "value",
    [
        b"x", {1, 2}, object(), 1j, torch.ones(1), Word("a"), Level.LOW, Pair(1, 2), defaultdict(list), Counter("a"),
        numpy.ones(2), numpy.str_("a"), numpy.complex64(1), torch.device("cpu"), type("Sub", (list,), {})(),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_value_when_it_cannot_come_back_as_it_is_is_refused_with_its_place(value):
    with pytest.raises(TypeError, match=r"^extra\.deep\.0 is a "):
        encode({"deep": [value]}, "extra")
