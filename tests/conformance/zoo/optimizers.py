"""Features: optimisers and what they keep."""

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW, Muon, Optimizer

from tests.conformance.zoo.feature import HIDDEN, IN, OUT, ZooTask, feature


@feature("Optimisers", "AdamW with a schedule and clipping", clip_norm=0.5)
class ScheduledAdamW(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=0.01)

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        return lambda seen: 1 - 0.8 * seen / 49


@feature("Optimisers", "several parameter groups")
class ParameterGroups(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        weights = [p for p in model.parameters() if p.dim() > 1]
        biases = [p for p in model.parameters() if p.dim() == 1]
        return AdamW(
            [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.03, "weight_decay": 0.0}], lr=0.01
        )


@feature("Optimisers", "a learning rate that each parameter has as an attribute")
class RateAttribute(ZooTask):
    def build_model(self) -> nn.Module:
        model: Any = super().build_model()
        for number, parameter in enumerate(model.parameters()):
            parameter.rate = 0.1 / (1 + number)
        return cast(nn.Module, model)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD([{"params": [p], "lr": getattr(p, "rate", 0.1)} for p in model.parameters()], lr=0.1, momentum=0.9)


class ScaledByAttribute(SGD):
    """SGD that reads in each step how far a parameter steps."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(getattr(parameter, "rate", 0.1))
        return super().step(closure)


@feature("Optimisers", "an attribute of the parameters that the optimiser's step reads")
class RateReadInStep(RateAttribute):  # type: ignore[misc, valid-type]
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return ScaledByAttribute(model.parameters(), lr=1.0, momentum=0.9)


@feature("Optimisers", "hooks on gradients that `build_optimizer` registers", declares=("hooks on gradients",))
class HooksOfOptimizer(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
        return super().build_optimizer(model)


class Counted(SGD):
    """Momentum that grows with a plain count that each parameter's state has."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["note"] = f"step {state['count']}"
                state["history"] = [*state.get("history", []), state["count"]][-3:]
                parameter.sub_(parameter.grad, alpha=group["lr"] * (1 + 0.1 * state["count"]))


@feature("Optimisers", "plain entries in the optimiser's state")
class PlainEntries(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Counted(model.parameters(), lr=0.05)


class WithExtraKeys(SGD):
    """A learning rate that follows a number which only `state_dict` carries."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.warmth = 0.0

    def step(self, closure: Any = None) -> Any:
        self.warmth += 0.2
        for group in self.param_groups:
            group["lr"] = 0.02 * (1 + self.warmth)
        return super().step(closure)

    def state_dict(self) -> Any:
        return {**super().state_dict(), "warmth": self.warmth}

    def load_state_dict(self, state: Any) -> None:
        self.warmth = state["warmth"]
        super().load_state_dict({key: value for key, value in state.items() if key != "warmth"})


@feature("Optimisers", "keys that `state_dict` adds")
class ExtraKeys(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return WithExtraKeys(model.parameters(), lr=0.02)


class WithAttribute(SGD):
    """A learning rate that follows an attribute which nothing saves."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 0.02 * (1 + 0.1 * self.calls)
        return super().step(closure)


@feature("Optimisers", "an attribute of the optimiser that nothing saves", declares=("optimiser",))
class UnsavedAttribute(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return WithAttribute(model.parameters(), lr=0.02)


class InDictionary(SGD):
    """Momentum in a dictionary by the place of a parameter, which its steps fill."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.momenta: dict[tuple[int, int], torch.Tensor] = getattr(self, "momenta", {})
        for number, group in enumerate(self.param_groups):
            for place, p in enumerate(group["params"]):
                if p.grad is not None:
                    momentum = self.momenta.setdefault((number, place), torch.zeros_like(p))
                    p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=group["lr"])


@feature("Optimisers", "tensors that an optimiser keeps in a dictionary of its own")
class TensorsInAttribute(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return InDictionary(model.parameters(), lr=0.1)


class Adapting(SGD):
    """Adapts a group's learning rate to the gradients of its only parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            (p,) = group["params"] or (None,)
            if p is not None and p.grad is not None:
                before = self.state[p].get("before", p.grad)
                group["lr"] *= 1.05 if float((before * p.grad).sum()) > 0 else 0.9
                self.state[p]["before"] = p.grad.clone()
                p.sub_(p.grad, alpha=group["lr"])


@feature("Optimisers", "learning rates that an optimiser's step sets, one for each parameter")
class RatesSetInStep(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Adapting([{"params": [p]} for p in model.parameters()], lr=0.1)


class Optimistic(SGD):
    """Steps by the gradient before too, which it keeps as an attribute of the parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(2 * p.grad - getattr(p, "before", p.grad), alpha=group["lr"])
                    p.before = p.grad.clone()


@feature("Optimisers", "attributes that an optimiser's step gives to parameters", declares=("began to change later",))
class AttributesSetInStep(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Optimistic(model.parameters(), lr=0.1)


class SAM(SGD):
    """A step that needs the loss again: sharpness-aware minimisation."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure()
        return super().step()


@feature("Optimisers", "an optimiser that needs a closure (SAM)")
class NeedsClosure(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SAM(model.parameters(), lr=0.05)


class OptionalSAM(SGD):
    """The same, as most implementations have it: the closure is optional by its signature only."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "SAM requires a closure"
        closure()
        return super().step()


@feature("Optimisers", "an optimiser that asserts a closure")
class AssertsClosure(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return OptionalSAM(model.parameters(), lr=0.05)


@feature("Optimisers", "L-BFGS")
class QuasiNewton(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return LBFGS(model.parameters())


@feature("Optimisers", "Muon for the matrices")
class MuonOnly(ZooTask):
    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(IN, HIDDEN, bias=False), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Tanh(),
            nn.Linear(HIDDEN, OUT, bias=False),
        ).double()  # fmt: skip

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Muon(model.parameters(), lr=0.02)


class GloballyNormed(Optimizer):
    """A step whose length depends on all gradients together."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            norm = torch.sqrt(sum(p.grad.square().sum() for p in used))
            for parameter in used:
                parameter.sub_(parameter.grad / (1 + norm), alpha=group["lr"])


@feature("Optimisers", "a step that looks at all gradients together")
class GlobalNorm(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return GloballyNormed(model.parameters())


class Noisy(SGD):
    """Langevin dynamics: noise in each step, from the global generator."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(0.01 * torch.randn_like(parameter))


@feature("Optimisers", "an optimiser that draws random numbers (Langevin)")
class NoisyOptimizer(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Noisy(model.parameters(), lr=0.1)


class Gated(SGD):
    """Steps that are only taken while the largest gradient is above a bound."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if max((float(gradient.abs().max()) for gradient in gradients), default=0.0) > 0.15:
            super().step(closure)


@feature("Optimisers", "a step that is taken while the largest gradient is above a bound")
class GatedOptimizer(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Gated(model.parameters(), lr=0.1)


class EverySecond(SGD):
    """Steps with the gradients of two calls, counted in an attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_calls = 0

    def step(self, closure: Any = None) -> Any:
        self.num_calls += 1
        if self.num_calls % 2 == 0:
            super().step(closure)


@feature("Optimisers", "an optimiser that counts its calls in an attribute")
class CountingOptimizer(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return EverySecond(model.parameters(), lr=0.1)


@feature("Optimisers", "a learning rate that follows from the weights at the start")
class RateOfWeights(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD([{"params": [p], "lr": 0.05 * float(p.detach().norm())} for p in model.parameters()], lr=0.1)


@feature("Optimisers", "a parameter group that the schedule adds (unfreezing)")
class AddedGroup(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        self.later = list(model.parameters())[:2]
        return SGD(list(model.parameters())[2:], lr=0.1)

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        def factor(seen: int) -> float:
            if seen > 30 and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": self.later})
            return 1.0

        return factor


class FromTheStart(SGD):
    """Weights that are drawn back to where they began, which a list remembers."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.start = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter, start in zip(self.param_groups[0]["params"], self.start, strict=True):
            parameter.lerp_(start, 0.01)


@feature("Optimisers", "initial weights in a list of the optimiser's (L2-SP)")
class DrawnToTheStart(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return FromTheStart(model.parameters(), lr=0.1)


class OfInputs(SGD):
    """Divides each layer's gradient by the mean square of the layer's inputs, which hooks keep for it."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        super().__init__([{"params": [*layer.parameters()], "name": name} for name, layer in layers.items()], lr=lr)
        self.squares: dict[str, Tensor] = {}
        for name, layer in layers.items():
            layer.register_forward_pre_hook(functools.partial(self.keep, name))

    def keep(self, name: str, layer: nn.Module, inputs: tuple[Tensor]) -> None:
        if layer.training and torch.is_grad_enabled():
            self.squares[name] = inputs[0].detach().square().mean()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= 1 + self.squares[group["name"]]
        return super().step(closure)


@feature(
    "Optimisers",
    "statistics of the layers' inputs, which hooks keep for the optimiser (KFAC)",
    declares=("state that the loss keeps",),
)
class StatisticsForOptimizer(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return OfInputs(model, lr=0.1)


class ByCurvature(SGD):
    """Divides each gradient by the curvature that the loss has stored in an attribute of its parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= 1 + parameter.curvature.abs()
        return super().step(closure)


@feature(
    "Optimisers",
    "curvature that the loss stores in attributes of the parameters (AdaHessian)",
    declares=("state that the loss keeps",),
)
class CurvatureForOptimizer(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return ByCurvature(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if model.training:
            parameters = [*model.parameters()]
            gradients = torch.autograd.grad(loss, parameters, create_graph=True)
            ones = [torch.ones_like(parameter) for parameter in parameters]
            for parameter, curvature in zip(parameters, torch.autograd.grad(gradients, parameters, ones), strict=True):
                parameter.curvature = curvature.detach()  # type: ignore[attr-defined]
            loss = super().loss(model, batch)  # the graph of the first is gone
        return loss
