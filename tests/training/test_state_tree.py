"""Nested state through JSON: everything comes back, of the same type, to the bit."""

import json
import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.training.state_tree import decode, encode

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
    tensors: dict[str, torch.Tensor] = {}
    tree = {"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.zeros(1)}, "list": [torch.full((1,), 2.0)]}
    data = encode(tree, "state", tensors)
    assert sorted(tensors) == ["state.a.b.c", "state.a.b.c~2", "state.list.0"]
    assert [decode(data, tensors.__getitem__)[k][i].item() for k, i in (("a", "b.c"), ("a.b", "c"), ("list", 0))] == [
        1, 0, 2,
    ]  # fmt: skip


def test_numbers_when_of_numpy_become_plain_ones():
    assert encode([numpy.float32(0.5), numpy.int64(3)], "x") == [0.5, 3]
    assert math.isnan(decode(encode(math.nan, "x")))


@pytest.mark.parametrize("value", [b"x", {1, 2}, object(), 1j, torch.ones(1)])
def test_value_when_json_cannot_hold_it_is_refused_with_its_place(value):
    with pytest.raises(TypeError, match=r"^extra\.deep\.0 is a "):
        encode({"deep": [value]}, "extra")
