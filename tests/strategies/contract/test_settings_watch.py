"""Tests of the watch over an optimiser's settings."""

import pytest
import torch
from torch import nn

from dure.strategies.contract.watch.settings_watch import SettingsWatch


def _optimizer(**settings):
    group = {"params": [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))], **settings}
    return torch.optim.Adam([group], lr=0.1, betas=(0.9, 0.99))


@pytest.mark.parametrize(
    "change",
    [
        lambda group: group.update(lr=0.2),
        lambda group: group.update(lr=torch.tensor(0.2)),
        lambda group: group.update(betas=torch.tensor([0.9, 0.99])),
        lambda group: group.update(betas=(0.8, 0.99)),
        lambda group: group["params"].pop(),
        lambda group: group.update(params=[nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(3))]),
        lambda group: group.update(params=[nn.Parameter(torch.zeros(5)), nn.Parameter(torch.ones(4))]),
        lambda group: group.pop("weight_decay"),
    ],
)
def test_watch_when_a_plain_setting_is_changed_then_it_is_seen(change):
    optimizer = _optimizer()
    watch = SettingsWatch(optimizer)
    watch.note()
    assert not watch.have_changed()
    watch.note()
    assert not watch.have_changed()
    change(optimizer.param_groups[0])
    assert watch.have_changed()


@pytest.mark.parametrize("change", [lambda group: group["rate"].mul_(2), lambda group: group["drops"].append(3)])
def test_watch_when_a_setting_is_changed_in_place_then_it_is_seen(change):
    optimizer = _optimizer(rate=torch.tensor([0.1, 0.1]), drops=[1])
    watch = SettingsWatch(optimizer)
    watch.note()
    assert not watch.have_changed()
    change(optimizer.param_groups[0])
    assert watch.have_changed()


def test_watch_when_a_setting_changed_between_two_calls_then_only_later_changes_count():
    optimizer = _optimizer()
    watch = SettingsWatch(optimizer)
    watch.note()
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    watch.note()
    assert not watch.have_changed()
    optimizer.param_groups[1]["lr"] = 0.3
    assert watch.have_changed()
