"""Trials of optimisers: which of them may be given a part of their parameters."""

import warnings
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from dure.errors import TaskInvalid
from dure.strategies.contract.precision import Precision
from dure.strategies.division.optimizer_trial import (
    NEEDS_CLOSURE,
    reason_not_to_cut,
    reason_not_to_divide,
    reason_of_classes,
)
from dure.strategies.state.optimizer import first_state, has_other_values


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5, bias=False), nn.Linear(5, 5, bias=False), nn.Linear(5, 3, bias=False))


class Coupled(optim.SGD):
    """Scales its steps by the norm of all gradients, as LAMB's first phase does."""

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
        for gradient in gradients:
            gradient.div_(norm)
        super().step()


class Seldom(optim.SGD):
    """Divides all weights by their norm in each thousandth step, which it counts in a way of its own."""

    def __init__(self, params, how="state", every=1000):
        super().__init__(params, lr=0.1)
        self.how, self.calls = how, 0
        if how == "settings":
            self.param_groups[0]["every"] = every

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        (group,) = self.param_groups
        self.calls += 1
        group["calls"] = group.get("calls", 0) + 1
        for p in group["params"]:
            self.state[p]["calls"] = self.state[p].get("calls", torch.tensor(0.0)) + 1
        counts = {
            "state": self.state[group["params"][0]]["calls"],
            "attribute": self.calls,
            "settings": group["calls"],
        }
        if counts[self.how] % group.get("every", EVERY) == 0:
            print(f"step {counts[self.how]}")
            norm = sum(p.square().sum() for p in group["params"]).sqrt()
            for p in group["params"]:
                p.div_(norm)


EVERY = 1000


class SeldomEach(optim.SGD):
    """Divides each parameter by its norm from the five hundredth step on."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["calls"] = self.state[p].get("calls", 0) + 1
            if self.state[p]["calls"] >= 500:
                p.div_(p.norm())


@pytest.mark.parametrize("how", ["state", "attribute", "settings"])
def test_optimiser_that_couples_all_parameters_in_a_late_step_is_found(how, capsys):
    optimizer = Seldom(model().parameters(), how)
    for reason in (reason_not_to_divide(optimizer), reason_not_to_cut(optimizer)):
        assert reason == "what it does to one parameter depends on the others"
    assert (optimizer.calls, capsys.readouterr().out) == (0, "")


def test_optimiser_that_couples_elements_in_a_late_step_is_not_cut():
    optimizer = SeldomEach(model().parameters(), lr=0.1)
    assert reason_not_to_divide(optimizer) is None
    assert reason_not_to_cut(optimizer) == "what it does to one element depends on the others of its tensor"


class WarmsUp(optim.SGD):
    """Raises its rate over forty steps, which it counts in an attribute, or deep in one."""

    def __init__(self, parameters, how):
        super().__init__(parameters, lr=0.1)
        self.how, self.calls, self.counts, self.clock = how, 0, {"all": [0]}, SimpleNamespace(calls=0)

    def step(self, closure=None):
        self.calls += 1
        self.counts["all"][0] += 1
        self.clock.calls += 1
        count = {"attribute": self.calls, "list": self.counts["all"][0], "object": self.clock.calls}[self.how]
        for group in self.param_groups:
            group["lr"] = 0.1 * min(1.0, count / 40)
        super().step()


@pytest.mark.parametrize("how", ["attribute", "list", "object"])
def test_optimiser_that_counts_its_steps_anywhere_is_divided_and_its_counts_put_back(how):
    optimizer = WarmsUp(model().parameters(), how)
    assert reason_not_to_divide(optimizer) is None
    assert reason_not_to_cut(optimizer) is None
    assert (optimizer.calls, optimizer.counts["all"][0], optimizer.clock.calls) == (0, 0, 0)


class Estimating(optim.SGD):
    """Finds its rate in the first step from all parameters, as Prodigy does, and uses it from the second on."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            group["lr"] = max([float(p.detach().abs().max()) for p in group["params"]], default=0.0)


class Counting(optim.SGD):
    """Counts its steps in its state, where only parameters have a place."""

    def step(self, closure=None):
        super().step()
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1


class Chained(optim.SGD):
    """Moves each parameter by the one after it in its group."""

    def step(self, closure=None):
        super().step()
        for one, other in pairwise(self.param_groups[0]["params"]):
            one.data.add_(other.data.sum())


class Warns(optim.SGD):
    def step(self, closure=None):
        warnings.warn("its rate is low", stacklevel=2)
        return super().step(closure)


def test_optimiser_when_it_warns_then_that_is_no_fault_though_warnings_are_errors():
    assert reason_not_to_cut(Warns(model().parameters(), lr=1e-9)) is None


def test_optimiser_when_it_takes_sparse_gradients_alone_then_it_is_tried_with_those():
    own = type("Own", (optim.SparseAdam,), {"__module__": __name__})
    for kind in (optim.SparseAdam, own):
        assert reason_not_to_divide(kind([*model().parameters()])) is None
        assert reason_not_to_cut(kind([*model().parameters()])) is None


TOGETHER = {
    optim.LBFGS: "its step asks for a closure",
    Coupled: "what it does to one parameter depends on the others",
    Estimating: "what it does to one parameter depends on the others",
    Counting: "it keeps state of the whole beside that of the parameters",
    Chained: "what it does to one parameter depends on the others",
}


@pytest.mark.parametrize("kind", TOGETHER)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_optimiser_when_it_needs_all_parameters_then_the_reason_is_said(kind, device):
    assert TOGETHER[kind] in reason_not_to_divide(kind(model().to(device).parameters(), lr=0.1))


APART = [
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta, optim.Adagrad,
    optim.RMSprop, optim.Rprop, optim.ASGD, optim.Adafactor, optim.Muon,
]  # fmt: skip


@pytest.mark.parametrize("kind", APART)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_torchs_optimisers_when_tried_then_each_can_be_divided(kind, device):
    assert reason_not_to_divide(kind(model().to(device).parameters(), lr=0.1)) is None


def test_optimiser_when_tried_then_it_is_left_as_it_was():
    net = model()
    groups = [{"params": net[0].parameters(), "lr": 0.5}, {"params": [*net[1:].parameters()]}]
    optimizer = optim.Adagrad(groups, lr=0.1)
    weights = [p.detach().clone() for p in net.parameters()]
    groups, state, drawn = optimizer.param_groups, optimizer.state, torch.get_rng_state()
    assert reason_not_to_divide(optimizer) is None
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    assert {id(p) for p in state} == {id(p) for p in net.parameters()}
    assert [float(s["sum"].sum()) for s in state.values()] == [0.0] * 3
    assert all(torch.equal(p, w) for p, w in zip(net.parameters(), weights, strict=True))
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)


class Needy(optim.SGD):
    """Steps only parameters of one shape, so that no stand-in will do."""

    def step(self, closure=None):
        assert all(p.shape[1] in (7, 5) for group in self.param_groups for p in group["params"]), "which shape?"


def test_optimiser_when_it_takes_no_stand_ins_then_its_error_is_the_reason():
    needy = Needy(nn.Linear(7, 5, bias=False).parameters(), lr=0.1)
    assert reason_not_to_divide(needy).startswith("its step failed in a trial with AssertionError: which shape?")


class Clipping(optim.SGD):
    """Clips by the norm of all gradients."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()


class Wrapper(Optimizer):
    """Clips, and steps by another optimiser, with which it shares groups and state."""

    def __init__(self, parameters, lr):
        self.inner = optim.SGD(parameters, lr=lr)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        self.inner.step()


def test_optimiser_that_steps_by_another_one_is_not_divided():
    assert reason_not_to_divide(Wrapper(model().parameters(), lr=0.1)).startswith("it steps by another optimiser")


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
def test_optimiser_when_a_warm_up_begins_at_zero_then_it_is_tried_with_another_rate(rate):
    assert "depends on the others" in reason_not_to_divide(Clipping(model().parameters(), lr=rate))
    assert reason_not_to_divide(optim.SGD(model().parameters(), lr=rate)) is None


class Resting(optim.SGD):
    """Steps once in a hundred calls."""

    def step(self, closure=None):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls % 100 == 0:
            super().step()


def test_optimiser_when_a_trial_changes_nothing_then_it_is_not_divided():
    assert "changed nothing" in reason_not_to_divide(Resting(model().parameters(), lr=0.1))


class SkipsSpikes(optim.SGD):
    """Leaves out the whole step if any gradient has a spike."""

    def step(self, closure=None):
        if all(p.grad.abs().max() < 1e4 for group in self.param_groups for p in group["params"]):
            super().step()


def test_optimiser_that_skips_a_step_for_a_spike_in_one_parameter_is_not_divided():
    optimizer = SkipsSpikes(model().parameters(), lr=0.1)
    assert reason_not_to_divide(optimizer) == "what it does to one parameter depends on the others"


class CountsBusySteps(optim.SGD):
    """Lowers its rate by a group's own count of the steps in which it had any gradient."""

    def step(self, closure=None):
        for group in self.param_groups:
            if any(parameter.grad is not None for parameter in group["params"]):
                group["count"] = group.get("count", 0) + 1
                group["lr"] = 0.1 / group["count"]
        super().step()


class ExpectsGradients(optim.SGD):
    """Takes for granted that every parameter has a gradient."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)
        super().step()


def test_optimiser_is_tried_with_parameters_that_have_no_gradient_in_some_steps():
    counting = CountsBusySteps(model().parameters(), lr=0.1)
    assert reason_not_to_divide(counting) == "what it does to one parameter depends on the others"
    assert reason_not_to_cut(counting) == "what it does to one parameter depends on the others"
    assert reason_not_to_divide(ExpectsGradients(model().parameters(), lr=0.1)) is None


class Crowded(optim.SGD):
    """Cannot do without any of its parameters."""

    def step(self, closure: None = None) -> None:
        super().step()
        assert len(self.param_groups[0]["params"]) >= 2, "where is the other one?"


def test_optimiser_when_it_fails_over_a_part_then_its_error_is_the_reason():
    crowded: Optimizer = Crowded(model().parameters(), lr=0.1)
    assert "over a part of the parameters it fails with AssertionError: where is" in str(reason_not_to_divide(crowded))


class Rowwise(optim.SGD):
    """Scales each row of a gradient by its norm, as unit-wise clipping does."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm(dim=-1, keepdim=True))
        super().step()


@pytest.mark.parametrize("kind", [optim.Adafactor, optim.Muon, Rowwise])
def test_optimiser_that_looks_at_more_of_a_tensor_than_an_element_may_be_divided_but_not_cut(kind):
    optimizer = kind(model().parameters(), lr=0.1)
    assert reason_not_to_divide(optimizer) is None
    assert reason_not_to_cut(optimizer) == "what it does to one element depends on the others of its tensor"


class LeavesOut(optim.SGD):
    """Leaves out tensors by their gradients."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and self.is_left_out(parameter.grad):
                    parameter.grad = None
        super().step()


class LeavesOutZeros(LeavesOut):
    def is_left_out(self, gradient):
        return not gradient.any()


class LeavesOutSpikes(LeavesOut):
    def is_left_out(self, gradient):
        return gradient.abs().max() > 1e4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", [LeavesOutZeros, LeavesOutSpikes])
def test_optimiser_that_leaves_out_tensors_without_gradient_or_with_spikes_may_be_divided_but_not_cut(kind, dtype):
    optimizer = kind(model().to(dtype).parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    assert reason_not_to_divide(optimizer) is None
    assert reason_not_to_cut(optimizer) == "what it does to one element depends on the others of its tensor"


@pytest.mark.parametrize("kind", TOGETHER)
def test_optimiser_that_cannot_be_divided_cannot_be_cut_either(kind):
    optimizer = kind(model().parameters(), lr=0.1)
    assert reason_not_to_cut(optimizer) == reason_not_to_divide(optimizer)


@pytest.mark.parametrize(
    "kind",
    [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop, optim.Adadelta, optim.Adamax, optim.NAdam,
     optim.RAdam, optim.ASGD, optim.Rprop],
)  # fmt: skip
def test_optimiser_that_steps_each_element_by_itself_may_be_cut_and_is_left_as_it_was(kind):
    with torch.device("meta"):
        optimizer = kind(model().parameters(), lr=0.1)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    states = {key: dict(value) for key, value in optimizer.state.items()}
    assert reason_not_to_cut(optimizer) is None
    assert [[id(p) for p in group] for group in groups] == [
        [id(p) for p in group["params"]] for group in optimizer.param_groups
    ]
    assert {key: dict(value) for key, value in optimizer.state.items()} == states


class Holding(optim.SGD):
    """Steps by itself, and keeps whatever it is given beside its parameters."""

    def __init__(self, parameters, held):
        super().__init__(parameters, lr=0.1)
        self.held = held


def stepping_with(model):
    class Clipping(optim.SGD):
        def step(self, closure=None):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            return super().step(closure)

    return Clipping(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("hold", "where"),
    [
        (lambda model: model, "self.held"),
        (lambda model: [model], "self.held[...]"),
        (lambda model: {"first": next(model.parameters())}, "self.held['first']"),
        (lambda model: {next(model.parameters()): "first"}, "self.held (a key)"),
        (lambda model: lambda: model.parameters(), "self.held's model"),
        (lambda model: partial(nn.utils.clip_grad_norm_, model.parameters), "self.held"),
        (lambda model: optim.swa_utils.AveragedModel(model), "self.held"),
    ],
)
def test_optimiser_that_holds_a_model_is_neither_divided_nor_tried(hold, where):
    module = model()
    before = [parameter.clone() for parameter in module.parameters()]
    optimizer = Holding(module.parameters(), hold(module))
    assert f"beside its groups ({where})" in reason_not_to_divide(optimizer)
    assert all(map(torch.equal, before, module.parameters()))


def test_optimiser_whose_step_is_closed_over_a_model_is_not_divided():
    assert "(Clipping.step's model)" in reason_not_to_divide(stepping_with(model()))


@pytest.mark.parametrize("held", [None, 0.1, {"names": ["weight"]}, torch.zeros(3), nn.functional.relu])
def test_optimiser_that_holds_other_things_may_be_divided(held):
    assert reason_not_to_divide(Holding(model().parameters(), held)) is None


class Special(nn.Parameter):
    """A parameter that an optimiser may treat otherwise."""


class Scaled(optim.SGD):
    """Scales gradients by what `factor` says, in a subclass."""

    num_calls = 0

    def factor(self, parameter, index, group):
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure=None):
        self.num_calls += 1
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                parameter.grad.mul_(self.factor(parameter, index, group["params"]))
        return super().step(closure)


class ByPlace(Scaled):
    def factor(self, parameter, index, group):
        return 0.9 ** max(0, index - 3)


class ByFourth(Scaled):
    def factor(self, parameter, index, group):
        return 1 / (1 + group[3].grad.norm()) if len(group) > 3 else 1.0


class ByAllLater(Scaled):
    def factor(self, parameter, index, group):
        return 1 / (1 + sum(other.grad.square().sum() for other in group)) if self.num_calls > 40 else 1.0


class ByTensorLater(Scaled):
    def factor(self, parameter, index, group):
        return 1 / (1 + parameter.grad.norm()) if self.num_calls > 40 else 1.0


class BySize(Scaled):
    def factor(self, parameter, index, group):
        return 0.5 if parameter.numel() > 40 else 1.0


class ByManyElements(Scaled):
    def factor(self, parameter, index, group):
        return 0.5 if parameter.numel() > 10**7 else 1.0


class ByNormIfLarge(Scaled):
    def factor(self, parameter, index, group):
        is_large = parameter.dim() == 2 and min(parameter.shape) >= 128
        return 1 / (1 + parameter.grad.norm()) if is_large else 1.0


class ByLongRow(Scaled):
    def factor(self, parameter, index, group):
        return 1 / (1 + parameter.grad.norm()) if max(parameter.shape) > 10000 else 1.0


class ByClass(Scaled):
    def factor(self, parameter, index, group):
        return 0.2 if isinstance(parameter, Special) else 1.0


def deep(num_layers=8, size=8):
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(size, size) for _ in range(num_layers)])


OTHERS = "what it does to one parameter depends on the others"
ELEMENTS = "what it does to one element depends on the others of its tensor"


@pytest.mark.parametrize("kind", [ByPlace, ByFourth, ByAllLater])
def test_own_optimiser_that_needs_others_later_or_farther_on_is_not_divided(kind):
    optimizer = kind(deep().parameters(), lr=0.1)
    assert reason_not_to_divide(optimizer) == OTHERS
    assert reason_not_to_cut(optimizer) in (OTHERS, ELEMENTS)


@pytest.mark.parametrize(
    ("kind", "shape", "reason"),
    [
        (ByTensorLater, (8, 8), ELEMENTS),
        (BySize, (8, 8), ELEMENTS),
        (ByNormIfLarge, (512, 640), ELEMENTS),
        (ByLongRow, (20000, 700), ELEMENTS),
        (ByManyElements, (10000, 2000), "it does something else to large parameters than to small ones"),
    ],
)
def test_own_optimiser_that_goes_by_sizes_or_tensors_later_may_be_divided_but_not_cut(kind, shape, reason):
    parameters = [nn.Parameter(torch.empty(shape, device="meta")) for _ in range(3)]
    optimizer = kind(parameters, lr=0.1)
    assert reason_not_to_divide(optimizer) is None
    assert reason_not_to_cut(optimizer) == reason


def test_own_optimiser_that_goes_by_the_class_of_a_parameter_needs_the_models_own():
    parameters = [Special(torch.empty(8, 8)), nn.Parameter(torch.empty(8))]
    reason = "it goes by the class of a parameter (Special), and parts of one are plain parameters"
    assert reason_of_classes(ByClass(parameters, lr=0.1)) == reason_not_to_cut(ByClass(parameters, lr=0.1)) == reason
    assert reason_not_to_divide(ByClass(parameters, lr=0.1)) is None
    assert reason_of_classes(optim.SGD(parameters, lr=0.1)) is None
    assert reason_not_to_cut(Everyday(parameters, lr=0.1)) is None


class InDictionary(optim.SGD):
    """Keeps momentum in a dictionary of its own, by the place of a parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        self.momenta = getattr(self, "momenta", {})
        for place, p in enumerate(p for group in self.param_groups for p in group["params"]):
            momentum = self.momenta.setdefault(place, torch.zeros_like(p))
            p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=0.1)


class InLists(optim.SGD):
    """Keeps momentum in a list of each group."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            momenta = group.setdefault("momenta", [torch.zeros_like(p) for p in group["params"]])
            for p, momentum in zip(group["params"], momenta, strict=True):
                p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=0.1)


class InHelper(InDictionary):
    """Keeps momentum in an object of its own."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.helper = SimpleNamespace(momenta={})

    def step(self, closure=None):
        self.momenta = self.helper.momenta
        super().step()
        del self.momenta


class InGroups(optim.SGD):
    """Lowers a group's learning rate by the gradient of its only parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                group["lr"] /= 1 + p.grad.abs().amax().item()
                p.sub_(p.grad, alpha=group["lr"])


class OnParameters(optim.SGD):
    """Steps by the gradient before, which it keeps as an attribute of the parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(getattr(p, "before", p.grad), alpha=group["lr"])
                p.before = p.grad.clone()


def test_optimiser_whose_state_no_checkpoint_of_parts_would_have_whole_is_not_divided():
    parameters = [nn.Parameter(torch.empty(8, 8)) for _ in range(3)]
    in_dictionary = InDictionary(parameters, lr=0.1)
    reason = "it keeps values of its parameters in an attribute (momenta) and not in its state"
    assert reason_not_to_divide(in_dictionary) == reason_not_to_cut(in_dictionary) == reason
    assert not hasattr(in_dictionary, "momenta")
    assert "in a group (momenta) and not in its state" in reason_not_to_divide(InLists(parameters, lr=0.1))
    assert "in a group (momenta) and not in its state" in reason_not_to_cut(InLists(parameters, lr=0.1))
    assert "in an attribute (helper) and not in its state" in reason_not_to_divide(InHelper(parameters, lr=0.1))
    in_groups = InGroups([{"params": [p]} for p in parameters], lr=0.1)
    assert reason_not_to_divide(in_groups) == "it sets lr of a parameter group by the parameters that it steps"
    assert {group["lr"] for group in in_groups.param_groups} == {0.1}
    on_parameters = OnParameters(parameters, lr=0.1)
    reason = "it keeps values in attributes of the parameters (before), not in its state"
    assert reason_of_classes(on_parameters) == reason_not_to_cut(on_parameters) == reason
    assert reason_not_to_divide(on_parameters) is None
    assert not any(map(vars, parameters))


class Everyday(optim.SGD):
    """Counts its calls, and steps by an attribute of each parameter."""

    def step(self, closure=None):
        self.num_calls = getattr(self, "num_calls", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(getattr(parameter, "rate", 0.5))
            if self.num_calls % 6 == 0:
                super().step()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (optim.SGD, torch.float32),
        (optim.Adagrad, torch.float32),
        (optim.RAdam, torch.float32),
        (optim.AdamW, torch.bfloat16),
        (optim.Adafactor, torch.float32),
        (optim.Muon, torch.bfloat16),
    ],
)
def test_subclasses_of_torchs_optimisers_are_divided_and_cut_as_these_are(kind, dtype):
    own = type("Own", (kind,), {"__module__": __name__})
    model = nn.Sequential(*[nn.Linear(9, 9, bias=False, dtype=dtype) for _ in range(3)])
    of_torch, of_task = kind(model.parameters(), lr=0.01), own(model.parameters(), lr=0.01)
    assert reason_not_to_divide(of_task) is None
    assert reason_not_to_cut(of_task) == reason_not_to_cut(of_torch)


def test_own_optimiser_when_tried_then_its_attributes_and_state_are_as_they_were():
    class Own(optim.Adagrad):
        def step(self, closure=None):
            self.num_calls += 1
            self.seen["calls"] = self.num_calls
            return super().step(closure)

    net = model()
    optimizer = Own(net.parameters(), lr=0.1, initial_accumulator_value=0.5)
    optimizer.num_calls, optimizer.seen = 0, {}
    groups, state = optimizer.param_groups, optimizer.state
    assert reason_not_to_cut(optimizer) is None
    assert optimizer.num_calls == 0
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    assert all(torch.equal(s["sum"], torch.full_like(s["sum"], 0.5)) for s in state.values())


def test_first_state_when_numbers_follow_from_a_part_of_the_weights_then_ranks_differ():
    def built(weight, is_one_value=False):
        optimizer = optim.SGD([nn.Parameter(weight)], lr=0.1)
        norm = weight.norm()
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter]["scale"] = torch.full_like(weight, norm) if is_one_value else float(norm)
            optimizer.state[parameter]["start"] = weight.clone()
        return first_state(optimizer)

    one, other = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    assert has_other_values(built(one), built(other))
    assert has_other_values(built(one, is_one_value=True), built(other, is_one_value=True))
    assert not has_other_values(built(one), built(one))
    adagrad = optim.Adagrad([nn.Parameter(one)], initial_accumulator_value=0.1)
    assert not has_other_values(first_state(adagrad), first_state(adagrad))


class CallsClosure(optim.SGD):
    """Computes the loss again in every step, though its signature makes that look optional."""

    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


def test_optimiser_when_it_calls_a_closure_that_is_none_then_it_is_said_to_need_one():
    optimizer = CallsClosure([*model().parameters()])
    assert reason_not_to_divide(optimizer) == NEEDS_CLOSURE
    with pytest.raises(TaskInvalid, match="CallsClosure needs a closure"):
        Precision("fp32", "cpu").step(optimizer)
