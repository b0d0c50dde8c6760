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
