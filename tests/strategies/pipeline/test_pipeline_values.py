"""Values that stages exchange: any nest of tensors passes through flat buffers unchanged, gradients too."""

import pytest
import torch
from torch import nn

from dure.errors import TaskInvalid
from dure.strategies.sections.values import describe, lanes_of, leaves_of, nothing, num_bytes, packed, rebuilt, unpacked

ANCHOR = torch.zeros((), requires_grad=True)


def example():
    """Return a nested value of several dtypes, and its differentiable tensors."""
    x = torch.randn(2, 3, requires_grad=True)
    half = torch.randn(5, dtype=torch.bfloat16, requires_grad=True)
    double = torch.randn((), dtype=torch.float64, requires_grad=True)
    value = (x, {"half": half, "mask": torch.tensor([True, False, True]), "step": 3}, [torch.arange(4), None, double])
    return value, [x, half, double]


def carried(value, *more):
    """Send a value through buffers that also fit others; return what arrives, and the buffers at both ends."""
    description = describe(value, "block")
    lanes = lanes_of([description, *(describe(other, "block") for other in more)])
    sent = packed(value, description, lanes, ANCHOR, "block")
    received = [buffer.detach().clone().requires_grad_(True) for buffer in sent]
    return unpacked(received, description, lanes), sent, received


@pytest.mark.parametrize("more", [(), (torch.zeros(9, 9), torch.zeros(40, dtype=torch.int64))], ids=["exact", "longer"])
def test_any_value_arrives_as_it_was_sent(more):
    value, _ = example()
    (x, items, others), sent, _ = carried(value, *more)
    assert all(buffer.dim() == 1 for buffer in sent)
    assert torch.equal(x, value[0])
    assert torch.equal(items["half"], value[1]["half"])
    assert torch.equal(items["mask"], value[1]["mask"])
    assert items["mask"].dtype == torch.bool
    assert items["step"] == 3
    assert torch.equal(others[0], torch.arange(4))
    assert others[1] is None
    assert torch.equal(others[2], value[2][2])


def test_gradients_come_back_to_what_was_sent_and_none_to_what_fills_up():
    value, leaves = example()
    (x, items, others), sent, received = carried(value, torch.zeros(9, 9))
    (2 * x.sum() + 3 * items["half"].float().sum() + 5 * others[2]).backward()
    torch.autograd.backward(sent, [buffer.grad for buffer in received])
    assert [leaf.grad.double().mean().item() for leaf in leaves] == [2.0, 3.0, 5.0]
    long = max(received, key=len)
    assert len(long) == 81
    assert long.grad[6:].any().item() is False


def test_a_received_value_may_be_changed_in_place():
    """`nn.ReLU(inplace=True)` may be the first block of a section."""
    arrived, _, received = carried(torch.tensor([-1.0, 2.0], requires_grad=True))
    nn.functional.relu_(arrived).sum().backward()
    assert received[0].tolist() == [-1.0, 2.0]
    assert received[0].grad.tolist() == [0.0, 1.0]


def test_buffers_require_a_gradient_even_of_values_that_do_not():
    _, sent, _ = carried(torch.arange(3))
    assert all(buffer.requires_grad for buffer in sent)
    torch.autograd.backward(sent, [torch.ones_like(buffer) for buffer in sent])
    assert ANCHOR.grad is None


def test_lanes_are_as_long_as_the_longest_value_and_counted_in_bytes():
    lanes = lanes_of([describe(value, "b") for value in (torch.zeros(3), torch.zeros(5), torch.zeros(3, dtype=bool))])
    assert lanes == {"bytes": 2, "float32": 5}
    assert num_bytes(lanes) == 2 * 4 + 5 * 4
    assert lanes_of([]) == {"float32": 1}


def test_descriptions_are_json_and_say_shapes():
    import json

    value, _ = example()
    description = json.loads(json.dumps(describe(value, "block")))
    assert [(str(leaf.dtype), leaf.shape) for leaf in leaves_of(description)] == [
        ("torch.float32", [2, 3]), ("torch.bfloat16", [5]), ("torch.bool", [3]), ("torch.int64", [4]),
        ("torch.float64", []),
    ]  # fmt: skip
    again = rebuilt(description, lambda dtype, shape: torch.zeros(shape, dtype=dtype))
    assert type(again) is tuple
    assert again[1]["step"] == 3


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "layer returned object: what goes from section to section may be dense real tensors"),
        (torch.zeros(2, dtype=torch.complex64), r"layer returned a torch\.strided tensor of torch\.complex64"),
        (torch.eye(2).to_sparse(), r"a torch\.sparse_coo tensor"),
        ({1: torch.zeros(1)}, "layer returned dict"),
    ],
)
def test_a_value_that_cannot_be_handed_on_is_refused_with_the_blocks_name(value, said):
    with pytest.raises(TaskInvalid, match=said):
        describe(value, "layer")


def test_a_value_of_another_shape_than_agreed_is_refused():
    description = describe(torch.zeros(2, 3), "layer")
    with pytest.raises(TaskInvalid, match=r"layer gave float32 \(2, 4\), but float32 \(2, 3\) for an earlier batch"):
        packed(torch.zeros(2, 4), description, lanes_of([description]), ANCHOR, "layer")


@pytest.mark.parametrize("lanes", [{"float32": 4}, None], ids=["in between", "last"])
def test_nothing_is_zeros_with_zero_gradients(lanes):
    received = torch.ones(3, requires_grad=True)
    zeros = nothing([received], lanes, ANCHOR)
    assert [tuple(zero.shape) for zero in zeros] == [(4,) if lanes else ()]
    torch.autograd.backward(zeros, [torch.ones_like(zero) for zero in zeros])
    assert received.grad.tolist() == [0.0, 0.0, 0.0]
