"""Outputs of several devices are joined to one device's, or refused when they are used."""

import copy
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from dure.errors import TaskInvalid
from dure.strategies.division.gathering import Gathering, gather
from dure.strategies.state.not_gathered import NotGathered

CPU = torch.device("cpu")
COUNTS = [2, 1]
Pair = namedtuple("Pair", "logits hidden")


@dataclass
class Record:
    logits: Any
    aux: Any = None


class Output(OrderedDict):
    """A mapping whose items are attributes too."""

    def __init__(self, **items):
        super().__init__(items)
        self.__dict__.update(items)


class Cache:
    """A class that nothing is known of."""

    def __init__(self, n):
        self.keys = torch.ones(n, 2)


def part(n):
    return torch.full((n, 2), n)


@pytest.mark.parametrize(
    ("form", "read"),
    [
        (lambda n: part(n), lambda out: out),
        (lambda n: (part(n), None), lambda out: out[0]),
        (lambda n: Pair(part(n), "same"), lambda out: out.logits),
        (lambda n: Record(part(n), 3), lambda out: out.logits),
        (lambda n: Output(logits=part(n)), lambda out: out.logits),
        (lambda n: {"a": [Record([part(n)])]}, lambda out: out["a"][0].logits[0]),
        (lambda n: SimpleNamespace(logits=part(n)), lambda out: out.logits),
        (lambda n: ((part(n), part(n)), (part(n), part(n))), lambda out: out[1][0]),
        (lambda n: part(n).to_sparse(), lambda out: out.to_dense()),
        (lambda n: part(n).numpy(), torch.from_numpy),
        (lambda n: list(part(n)), torch.stack),
        (lambda n: [{"row": row} for row in part(n)], lambda out: torch.stack([item["row"] for item in out])),
    ],
)
def test_rows_of_all_devices_are_joined_in_containers_of_any_class(form, read):
    outputs = [form(n) for n in COUNTS]
    joined = gather(outputs, CPU, COUNTS)
    assert type(joined) is type(outputs[0])
    assert read(joined).tolist() == [[2, 2], [2, 2], [1, 1]]


def test_nested_tensors_are_joined_by_rows_and_keep_their_gradients():
    weight = torch.ones(3, requires_grad=True)
    outputs = [torch.nested.as_nested_tensor([weight * n, weight[:n]], layout=torch.jagged) for n in (1, 2)]
    joined = gather(outputs, CPU, [2, 2])
    assert [len(row) for row in joined.unbind()] == [3, 1, 3, 2]
    sum(row.sum() for row in joined.unbind()).backward()
    assert weight.grad.tolist() == [5, 4, 3]


@pytest.mark.parametrize(
    "value", [None, 3, "text", 0.5, True, torch.float32, float("nan"), torch.tensor(2.0), np.float64(1)]
)
def test_what_is_equal_on_all_devices_stays(value):
    joined = gather([{"x": value}, {"x": copy.copy(value)}], CPU, COUNTS)["x"]
    assert joined is value or joined == value or joined != joined


@pytest.mark.parametrize(
    ("values", "seen"),
    [
        ((torch.tensor(1.0), torch.tensor(2.0)), "a scalar"),
        ((2, 1), r"different values \(2 and 1\)"),
        ((torch.ones(3), 2 * torch.ones(3)), r"a tensor of shape \(3,\) for 2 samples"),
        ((torch.ones(5, 2), torch.ones(5, 1)), r"a tensor of shape \(5, 2\) for 2 samples"),
        ((torch.ones(2, 3), torch.ones(1, 4)), r"tensors of shapes \(2, 3\), \(1, 4\), which do not fit each other"),
        ((Cache(2), Cache(1)), "a Cache, whose class dp does not know,"),
        ((None, torch.ones(1, 2)), r"objects of different classes \(NoneType, Tensor\)"),
        (({"a": 1}, {"b": 1}), "a dict with other items"),
        (
            (torch.distributions.Normal(0, torch.ones(2)), torch.distributions.Normal(0, torch.ones(1))),
            "a Normal, whose class dp does not know,",
        ),
        ((nn.Linear(1, 1), nn.Linear(1, 1)), "a Linear, whose class dp does not know,"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_joined_is_refused_as_the_whole_output_and_on_use_as_a_part_of_it(values, seen):
    with pytest.raises(
        TaskInvalid, match=f"the model returned {seen} on each device: dp gathers outputs along the sam"
    ):
        gather(values, CPU, COUNTS)
    joined = gather([{"x": values[0]}, {"x": values[1]}], CPU, COUNTS)
    with pytest.raises(TaskInvalid, match=rf"{seen} on each device in output\['x'\]: dp .*use balanced_dp or ddp"):
        torch.ones(1) + joined["x"]


def test_values_that_differ_are_shown_though_the_first_two_are_the_same():
    with pytest.raises(TaskInvalid, match=r"different values \(1 and 3\)"):
        gather([1, 1, 3], CPU, [2, 1, 1])


def test_sizes_that_coincide_are_told_apart_by_what_is_known():
    parts = [(torch.ones(2), torch.full((2,), 7.0)), (torch.ones(2), torch.full((2,), 7.0))]
    assert len(gather(parts, CPU, [2, 2])[1]) == 4
    known = Gathering(device=CPU, counts=[2, 2], shared=frozenset({(("item", 1),)}))
    assert len(known.of(parts)[1]) == 2
    wrong = Gathering(device=CPU, counts=[2, 2], wrong=frozenset({(("item", 1),)})).of(parts)
    assert len(wrong[0]) == 4
    with pytest.raises(TaskInvalid, match=r"something else in output\[1\] for the parts of a batch than for the whole"):
        wrong[1].mean()


USES = {
    "add": lambda x: x + 1,
    "added": lambda x: 1 + x,
    "tensor": lambda x: torch.ones(2) * x,
    "function": lambda x: torch.stack([torch.ones(2), x]),
    "functional": functional.relu,
    "attribute": lambda x: x.item,
    "index": lambda x: x[0],
    "indexing": lambda x: torch.ones(2)[x],
    "iteration": list,
    "truth": bool,
    "number": float,
    "comparison": lambda x: x == 1,
    "isinstance": lambda x: isinstance(x, torch.Tensor),
    "call": lambda x: x(),
    "text": str,
    "format": lambda x: f"{x}",
    "hash": lambda x: {x},
    "setting": lambda x: setattr(x, "a", 1),
}


@pytest.mark.parametrize("use", USES)
def test_any_use_of_what_was_not_gathered_raises_the_reason(use):
    with pytest.raises(TaskInvalid, match="the reason"):
        USES[use](NotGathered("the reason"))


def test_what_was_not_gathered_may_lie_around():
    value = NotGathered("the reason")
    assert value is not None
    assert copy.deepcopy([value])[0] is value
    assert repr(value) == "<not gathered: the reason>"


def test_references_to_tensors_of_each_device_are_refused():
    tensors = [torch.ones(2), torch.zeros(2)]  # as torch's LSTM keeps for the weights that a forward sets
    with pytest.raises(TaskInvalid, match="different values"):
        gather([weakref.ref(tensor) for tensor in tensors], CPU, COUNTS)
