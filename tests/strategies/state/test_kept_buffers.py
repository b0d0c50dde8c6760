"""Buffers of a model that code writes to, replaces, registers and removes, and their restoration."""

import torch
from torch import nn

from dure.strategies.state.kept_buffers import KeptBuffers


def with_buffers() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("count", torch.zeros(()))
    model.register_buffer("later", None)
    return model


def test_buffers_that_were_written_to_replaced_set_or_registered_are_named_and_put_back():
    model = with_buffers()
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    kept = KeptBuffers(model)
    assert kept.changed() == []
    model.count = model.count + 1
    model[1].running_mean.add_(1)
    model.later = torch.ones(2)
    model[0].register_buffer("new", torch.ones(1))
    assert sorted(kept.changed()) == ["0.new", "1.running_mean", "count", "later"]
    kept.put_back()
    assert kept.changed() == []
    assert model.later is None
    assert dict(model.named_buffers()).keys() == before.keys()
    for name, buffer in model.named_buffers():
        assert buffer is before[name][0]
        assert torch.equal(buffer, before[name][1])


def test_buffers_that_are_not_selected_stay_as_they_are():
    model = with_buffers()
    kept = KeptBuffers(model, lambda name: name == "count")
    model.count.add_(1)
    model[1].running_mean = model[1].running_mean + 1
    assert kept.changed() == ["count"]
    kept.put_back()
    assert model.count == 0
    assert model[1].running_mean.tolist() == [1, 1]
