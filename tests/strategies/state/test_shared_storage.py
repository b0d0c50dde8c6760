"""Tensors and arrays that share memory with parameters."""

import numpy as np
import torch
from torch import nn

from dure.strategies.state.shared_storage import sharing_memory


class Holder:
    """An object of a task."""

    def __init__(self, **held: object) -> None:
        vars(self).update(held)


def test_parts_of_memory_are_found_wherever_they_are_held():
    table = np.ones((6, 4), dtype=np.float32)
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight = nn.Parameter(torch.from_numpy(table[2:]))
    model[1].register_buffer("turned", model[1].weight.data.t())
    bias = model[2].bias.detach().numpy()
    assert sharing_memory(model, {}) == ["1.weight", "1.turned"]
    assert sharing_memory(model, {"task": Holder(table=table, head=table[:2], tail=table[::-1])}) == [
        "0.weight", "1.weight", "1.turned", "task.table", "task.tail",
    ]  # fmt: skip
    model[1].turned = model[1].turned.clone()
    assert sharing_memory(model, {"task": Holder(last=[bias[1:]], copied=bias.copy())}) == ["2.bias", "task.last[0]"]


def test_a_parameter_of_several_names_and_what_has_no_elements_share_nothing():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.ParameterList([torch.empty(0)]))
    model[1].weight = model[0].weight
    model[0].register_buffer("none", model[0].weight.data[:0])
    assert sharing_memory(model, {"task": Holder(none=model[0].bias.detach().numpy()[:0])}) == []


class Wrapped(torch.Tensor):
    """Tensor without memory of its own, as quantised ones that wrap others."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapped":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(func(args[0].inner))


def test_tensor_that_wraps_others_shares_nothing():
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(Wrapped(torch.ones(3, 3).half()), requires_grad=False)
    assert sharing_memory(model, {"task": Holder(wrapped=Wrapped(torch.ones(3).half()))}) == []
