"""A watch over what a loss does to parameters."""

import gc

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _global_parameter_registration_hooks

from dure.errors import TaskInvalid
from dure.strategies.contract.watch.parameter_watch import Freezing, ParameterWatch


def model_of_two():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def test_watch_when_parameters_are_frozen_and_unfrozen_then_says_which_once():
    model = model_of_two()
    model[0].requires_grad_(False)
    watch = ParameterWatch(model, "fsdp")
    assert watch.freezing() is None
    model[0].weight.requires_grad_(True)
    model[1].requires_grad_(False)
    assert watch.freezing() == Freezing(frozen=["1.weight", "1.bias"], unfrozen=["0.weight"])
    assert watch.freezing() is None


@pytest.mark.parametrize("through_data", [False, True])
def test_watch_when_a_parameter_is_written_to_then_names_it(through_data):
    model = model_of_two()
    watch = ParameterWatch(model, "fsdp", sees_writes=True)
    target = model[1].weight
    with pytest.raises(TaskInvalid, match=r"writes to parameters \(1\.weight\), which fsdp would undo"), watch:
        (target.data if through_data else target.detach()).mul_(0.5)
    with watch:
        pass


@pytest.mark.parametrize("name", ["1", "new"])
def test_watch_when_a_module_is_put_into_the_model_then_refuses_it(name):
    model = model_of_two()
    watch = ParameterWatch(model, "fsdp")
    with watch:
        with pytest.raises(TaskInvalid, match=f"puts a new Linear into the model as {name}"):
            model.register_module(name, nn.Linear(2, 1))
        nn.Linear(1, 1)  # one of nobody's
        model[0].weight = model[0].weight  # the same again, as ties are renewed
    model.register_module("later", nn.Linear(1, 1))


def test_watch_when_a_parameter_is_replaced_then_refuses_it_by_its_whole_name():
    model = model_of_two()
    watch = ParameterWatch(model, "fsdp")
    with watch, pytest.raises(TaskInvalid, match=r"puts a new Parameter into the model as 0\.weight during the run"):
        model[0].weight = nn.Parameter(torch.zeros(2, 2))


def test_watch_when_a_module_is_put_into_a_list_then_gives_its_whole_name():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)])})
    new = nn.Linear(2, 2)
    torch.optim.SGD(model.parameters(), lr=0.1).add_param_group({"params": new.parameters()})
    said = r"^the task's loss puts a new Linear into the model as layers\.1 during the run, and a resumed run, which"
    with ParameterWatch(model, "single"), pytest.raises(TaskInvalid, match=said):
        model["layers"].append(new)


def test_watch_when_it_is_gone_then_torch_calls_nothing_of_it():
    before = len(_global_parameter_registration_hooks)
    watch = ParameterWatch(model_of_two(), "ddp")
    assert len(_global_parameter_registration_hooks) == before + 1
    del watch
    gc.collect()
    assert len(_global_parameter_registration_hooks) == before


@pytest.mark.parametrize("deed", [lambda weight: weight.neg_(), lambda weight: weight.copy_(weight.flip(0))])
def test_watch_when_a_write_through_data_leaves_the_norm_as_it_was_then_names_it(deed):
    model = model_of_two()
    watch = ParameterWatch(model, "fsdp", sees_writes=True)
    with pytest.raises(TaskInvalid, match=r"writes to parameters \(0\.weight\)"), watch:
        deed(model[0].weight.data)


def test_watch_when_writes_through_data_begin_late_then_a_later_call_names_them(monkeypatch):
    monkeypatch.setattr("dure.strategies.contract.watch.parameter_watch._SUM_INTERVAL", 0)
    model = model_of_two()
    watch = ParameterWatch(model, "fsdp", sees_writes=True)
    for _ in range(10):
        with watch:
            pass
    with pytest.raises(TaskInvalid, match=r"writes to parameters \(0\.weight\)"), watch:
        model[0].weight.data.add_(1)


def test_watch_when_frozen_parameters_are_no_floats_then_sees_writes_to_them():
    model = model_of_two()
    model.table = nn.Parameter(torch.arange(4), requires_grad=False)
    model.mask = nn.Parameter(torch.ones(3, dtype=torch.bool), requires_grad=False)
    watch = ParameterWatch(model, "fsdp", sees_writes=True)
    with pytest.raises(TaskInvalid, match=r"writes to parameters \(table\)"), watch:
        model.table.data[0] = 5


def test_watch_when_a_parameter_is_another_ranks_then_its_placeholder_is_left_alone():
    model = model_of_two()
    model[0].weight.data = torch.full((), torch.nan).expand(2, 2)
    with ParameterWatch(model, "pipeline", sees_writes=True):
        pass
