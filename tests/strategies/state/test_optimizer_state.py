"""Optimiser state by names, beyond what torch's own `load_state_dict` keeps."""

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

from dure.errors import CheckpointMismatch, TaskInvalid
from dure.strategies.state.optimizer import (
    group_names,
    optimizer_from_names,
    optimizer_to_names,
    settings_of,
)
from tests.training.checkpoints.checkpoint_cases import TiedNet, train, trained


class MasterWeights(Optimizer):
    """Keeps a float32 copy and a byte mask beside each bfloat16 parameter, and a state of the whole."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            for p in group["params"]:
                copy = p.detach().float() + 1e-5
                self.state[p] = {"copy": copy, "mask": torch.tensor([1], dtype=torch.uint8), "nested": {"c": copy * 2}}
        self.state["rounds"] = 3


def test_state_when_float32_beside_bfloat16_parameters_is_not_rounded():
    model = nn.Linear(3, 2).bfloat16()
    saved = optimizer_to_names(model, MasterWeights(model.parameters()))
    kept = saved["state"]["weight"]["copy"].clone()
    with torch.no_grad():
        model.weight.zero_()
    other = MasterWeights(model.parameters())
    optimizer_from_names(model, other, saved)
    state = other.state[model.weight]
    assert torch.equal(state["copy"], kept)
    assert torch.equal(state["nested"]["c"], kept * 2)
    assert state["mask"].dtype == torch.uint8
    assert other.state["rounds"] == 3


class Signed(AdamW):
    """Keeps a mean of its own and no count of steps, for which AdamW looks when it is given state."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            p.sub_(mean.sign(), alpha=self.param_groups[0]["lr"])


def test_state_when_a_subclass_keeps_other_state_than_its_base_is_loaded():
    model, optimizer = trained(lambda p: Signed(p, lr=0.25))
    saved = optimizer_to_names(model, optimizer)
    trainable = [p for p in model.parameters() if p.requires_grad]
    other = Signed(trainable, lr=0.5)
    optimizer_from_names(model, other, saved)
    assert all(torch.equal(other.state[p]["mean"], optimizer.state[p]["mean"]) for p in trainable)
    assert other.param_groups[0]["lr"] == 0.25
    assert "__setstate__" not in vars(other)


def test_state_when_the_order_of_parameters_is_another_follows_the_names():
    model, optimizer = trained(lambda p: SGD(p, lr=0.1, momentum=0.9))
    saved = optimizer_to_names(model, optimizer)
    trainable = [p for p in model.parameters() if p.requires_grad]
    other = SGD(trainable[::-1], lr=9.0, momentum=0.1)
    optimizer_from_names(model, other, saved)
    for p in trainable:
        assert torch.equal(other.state[p]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])
    assert (other.param_groups[0]["lr"], other.param_groups[0]["momentum"]) == (0.1, 0.9)


def test_state_when_loaded_has_the_memory_format_of_its_parameter():
    model = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    optimizer = AdamW(model.parameters())
    model(torch.randn(1, 4, 5, 5)).sum().backward()
    optimizer.step()
    saved = optimizer_to_names(model, optimizer)
    contiguous = {
        name: {key: value.contiguous() for key, value in state.items()} for name, state in saved["state"].items()
    }
    other = AdamW(model.parameters(), fused=True)
    optimizer_from_names(model, other, {**saved, "state": contiguous})
    state = other.state[model.weight]
    assert state["exp_avg"].stride() == model.weight.stride()
    assert torch.equal(state["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    assert other.param_groups[0]["fused"]
    other.step()


def test_state_when_loaded_is_a_copy():
    model, optimizer = trained()
    saved = optimizer_to_names(model, optimizer)
    other = AdamW([p for p in model.parameters() if p.requires_grad])
    optimizer_from_names(model, other, saved)
    before = saved["state"]["norm.bias"]["exp_avg"].clone()
    train(model, other, 1)
    assert torch.equal(saved["state"]["norm.bias"]["exp_avg"], before)
    assert saved["state"]["norm.bias"]["step"] == 3


def test_state_of_lbfgs_when_loaded_continues_bit_equal():
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()
    inputs = torch.randn(16, 3, dtype=torch.float64)

    def step(net, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = (net(inputs) ** 4).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    one, two = LBFGS(model.parameters(), max_iter=3), LBFGS(twin.parameters(), max_iter=3)
    step(model, one)
    twin.load_state_dict(model.state_dict())
    optimizer_from_names(twin, two, optimizer_to_names(model, one))
    step(model, one)
    step(twin, two)
    assert torch.equal(model.weight, twin.weight)


def test_optimizer_with_a_parameter_outside_the_model_is_refused():
    model = TiedNet()
    with pytest.raises(TaskInvalid, match=r"parameter of shape \(7,\) that is not one of the model's"):
        optimizer_to_names(model, SGD([model.norm.weight, nn.Parameter(torch.zeros(7))]))


def test_optimizer_with_state_of_a_tensor_in_none_of_its_groups_is_refused():
    model, optimizer = trained()
    optimizer.state[torch.zeros(7)] = {"x": 1}
    with pytest.raises(TaskInvalid, match=r"state of a tensor of shape \(7,\) that is in none of its parameter groups"):
        optimizer_to_names(model, optimizer)


def test_state_of_an_unknown_parameter_is_refused():
    model, optimizer = trained()
    saved = optimizer_to_names(model, optimizer)
    saved["state"]["gone.weight"] = saved["state"].pop("norm.bias")
    with pytest.raises(CheckpointMismatch, match=r"optimiser state of gone\.weight"):
        optimizer_from_names(model, optimizer, saved)


def test_part_of_an_optimiser_when_loaded_takes_its_own_state_alone():
    model, optimizer = trained()
    saved, whole = optimizer_to_names(model, optimizer), group_names(model, optimizer)
    part = AdamW([model.norm.bias])
    optimizer_from_names(model, part, saved, whole=whole)
    assert list(part.state) == [model.norm.bias]
    assert torch.equal(part.state[model.norm.bias]["exp_avg"], optimizer.state[model.norm.bias]["exp_avg"])


def test_part_of_an_optimiser_that_trains_one_parameter_less_is_refused():
    model, optimizer = trained()
    saved, (names,) = optimizer_to_names(model, optimizer), group_names(model, optimizer)
    lacking = [name for name in names if name != "norm.weight"]
    with pytest.raises(CheckpointMismatch, match=r"not in both: norm\.weight"):
        optimizer_from_names(model, AdamW([model.norm.bias]), saved, whole=[lacking])


@pytest.mark.parametrize(
    "change",
    [
        lambda group: group.update(lr=0.2),
        lambda group: group["rate"].mul_(2),
        lambda group: group.update(rate=torch.tensor([0.1, 0.1])),
        lambda group: group["betas"].append(0.5),
        lambda group: group["params"].pop(),
        lambda group: group.pop("lr"),
    ],
)
def test_settings_when_one_is_changed_then_are_others(change):
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    group = {"params": parameters, "rate": torch.tensor([0.1, 0.1]), "betas": [0.9]}
    optimizer = torch.optim.SGD([group], lr=0.1)
    before = settings_of(optimizer)
    assert settings_of(optimizer) == before
    change(optimizer.param_groups[0])
    assert settings_of(optimizer) != before
