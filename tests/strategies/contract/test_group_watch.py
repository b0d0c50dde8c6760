"""Watch over an optimiser's groups: their parameters count, their order and freed memory do not."""

import pytest
import torch
from torch.optim import SGD

from dure.strategies.contract.watch.group_watch import ADDED, GroupWatch

CHANGED = "the parameters of a group of the optimiser changed during the run"
A, B, C, NEW = (torch.zeros(1) for _ in range(4))


@pytest.mark.parametrize(
    ("now", "change", "has_new"),
    [
        ([[A, B], [C]], None, False),
        ([[B, A], [C]], None, False),  # an optimiser may sort the parameters of a group in its step
        ([[A], [B, C]], CHANGED, False),
        ([[A, A], [C]], CHANGED, False),
        ([[A, C], [B]], CHANGED, False),
        ([[A, NEW], [C]], CHANGED, True),
        ([[A, B], [C], []], ADDED, False),
        ([[A, B], [C], [NEW]], ADDED, True),
    ],
)
def test_groups_when_their_parameters_change_then_the_change_is_told_and_what_is_new(now, change, has_new):
    optimizer = SGD([{"params": [A, B]}, {"params": [C]}], lr=0.1)
    watch = GroupWatch(optimizer, optimizer)
    optimizer.param_groups[:] = [{"params": group} for group in now]
    assert (watch.change(), watch.has_new_parameters()) == (change, has_new)


def test_parameter_when_the_model_began_with_it_then_is_not_new():
    optimizer = SGD([A], lr=0.1)
    watch = GroupWatch(optimizer, parameters=[B])
    optimizer.add_param_group({"params": [B]})
    assert (watch.change(), watch.has_new_parameters()) == (ADDED, False)


def test_parameter_when_it_has_the_place_of_one_that_is_gone_then_is_new():
    optimizer = SGD([A], lr=0.1)
    watch = GroupWatch(optimizer, parameters=[torch.zeros(1)])
    optimizer.add_param_group({"params": [torch.zeros(1)]})  # may have the id of the first
    assert watch.has_new_parameters()
