"""Tensors: their memory, parts and attributes."""

import pytest
import torch
from torch import nn

from dure.torchcompat.tensors import bytes_of, give_data, multiply_


def test_multiply_when_dtypes_differ_then_each_tensor_is_multiplied_in_place() -> None:
    tensors = [torch.ones(2), torch.ones(1, dtype=torch.float64)]
    multiply_(tensors, 3.0)
    multiply_(tensors, torch.tensor(2.0))
    assert [tensor.tolist() for tensor in tensors] == [[6, 6], [6]]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3.0)[None][:, 0],
        torch.arange(3.0)[None].t(),
        torch.arange(6).bfloat16().reshape(2, 3)[:, 1],
        torch.tensor(7),
        torch.zeros(0, 3),
        torch.tensor([1 + 2j]).conj(),
    ],
    ids=["column of one row", "one row turned", "column", "number", "nothing", "conjugate"],
)
def test_bytes_of_any_strides_then_are_those_of_a_plain_copy(tensor: torch.Tensor) -> None:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    assert bytes(bytes_of(tensor).tolist()) == bytes(plain.untyped_storage().tolist())


# -- memory on devices whose tensors have another implementation, as those of kinds from outside (here: meta)
def test_give_data_when_the_implementation_is_another_then_the_parameter_stays_with_its_hooks():
    parameter = nn.Parameter(torch.ones(2))
    parameter.mark = "kept"
    seen = []
    parameter.register_hook(lambda gradient: seen.append(gradient.device.type))
    parameter.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor.grad.device.type))
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.data = torch.empty(2, device="meta")
    give_data(parameter, torch.empty(2, device="meta"))
    assert (parameter.device.type, parameter.mark, parameter.is_leaf) == ("meta", "kept", True)
    parameter.sum().backward()
    give_data(parameter, torch.full((2,), 3.0))
    parameter.sum().backward()
    assert (parameter.tolist(), type(parameter)) == ([3.0, 3.0], nn.Parameter)
    assert seen == ["meta", "meta", "cpu", "cpu"]
