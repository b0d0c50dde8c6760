"""Optimiser state and parameters that calls of the task cannot use."""

import operator

import pytest
import torch
from torch import nn
from torch.optim import SGD

from dure.errors import TaskInvalid
from dure.strategies.contract.watch.hidden_state import HiddenParameters, StateGuard


@pytest.fixture
def optimizer():
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    return SGD([parameter], lr=0.1)


@pytest.mark.parametrize(
    "use",
    [
        list,
        len,
        lambda parameters: parameters[0],
        lambda parameters: [*parameters],
        lambda parameters: torch.autograd.grad(torch.ones(1, requires_grad=True).sum(), parameters),
    ],
    ids=["list", "len", "item", "unpacked", "as an argument"],
)
def test_parameters_of_groups_are_refused_in_a_call_and_back_after_it(optimizer, use):
    guard = StateGuard(optimizer, "fsdp", hides_parameters=True)
    with guard, guard, pytest.raises(TaskInvalid, match="take from the groups of the optimiser, where fsdp has parts"):
        use(optimizer.param_groups[0]["params"])
    assert type(optimizer.param_groups[0]["params"]) is list
    assert len(optimizer.param_groups[0]["params"]) == 1


def test_gradients_are_cleared_and_settings_read_in_a_call_that_hides_parameters(optimizer):
    parameter = optimizer.param_groups[0]["params"][0]
    with StateGuard(optimizer, "fsdp", hides_parameters=True):
        assert optimizer.param_groups[0]["lr"] == 0.1
        optimizer.zero_grad()
    assert parameter.grad is None


def test_parameters_are_shown_where_a_strategy_does_not_divide_them(optimizer):
    with StateGuard(optimizer, "parameter_server"):
        assert len(optimizer.param_groups[0]["params"]) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda parameters: operator.add([], parameters),  # as sum(groups, []) does
        lambda parameters: 2 * parameters,
        lambda parameters: parameters != [],
        lambda parameters: parameters.count(None),
        lambda parameters: [*parameters],
    ],
)
def test_hidden_parameters_when_lists_are_made_of_them_then_are_refused_and_not_empty(use):
    with pytest.raises(TaskInvalid, match="take from the groups of the optimiser"):
        use(HiddenParameters([torch.zeros(1)], "fsdp"))
