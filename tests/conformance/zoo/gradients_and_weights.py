"""Features: ways in which gradients come about, and weights that change otherwise than by the optimiser."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

from tests.conformance.zoo.feature import HIDDEN, IN, OUT, Samples, ZooTask, chain, data, feature


def mse(output: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(output, y)


class Recomputed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(IN, HIDDEN).double()
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN).double() for _ in range(3))
        self.last = nn.Linear(HIDDEN, OUT).double()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=self.use_reentrant))
        return self.last(x)


@feature("Gradients", "activation checkpointing, `use_reentrant=True`")
class CheckpointReentrant(ZooTask):
    def build_model(self) -> nn.Module:
        return Recomputed(use_reentrant=True)


@feature("Gradients", "activation checkpointing, `use_reentrant=False`")
class CheckpointNonReentrant(ZooTask):
    def build_model(self) -> nn.Module:
        return Recomputed(use_reentrant=False)


class Scaling(nn.Module):
    """Calls a layer without gradients, and again on the same value."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, HIDDEN).double()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(HIDDEN, 2 * HIDDEN), "down": nn.Linear(2 * HIDDEN, HIDDEN)}).double()
            for _ in range(2)
        )
        self.last = nn.Linear(HIDDEN, OUT).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(x)
            with torch.no_grad():
                scale = block["up"](x).abs().amax(1, keepdim=True)
            x = block["down"](torch.tanh(block["up"](x) / scale))
        return self.last(x)


@feature("Gradients", "a layer that is called without gradients first, and again with them on the same value")
class SeenWithoutGradients(ZooTask):
    def build_model(self) -> nn.Module:
        return Scaling()


@feature("Gradients", "a gradient penalty", eval_every_epochs=1e6)
class GradientPenalty(ZooTask):
    def eval_data(self) -> Any:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        x = x.clone().requires_grad_()
        output = model(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return mse(output, y) + 0.5 * gradient.square().mean()


@feature("Gradients", "a loss of second derivatives")
class SecondDerivatives(ZooTask):
    def eval_data(self) -> Any:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        x = x.clone().requires_grad_()
        output = model(x)
        (first,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return ((output - y).square().mean(1) + second.square().mean(1)).mean()


@feature("Gradients", "a loss that reads the gradients of parameters")
class ReadsGradients(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        norms = [parameter.grad.norm().detach() for parameter in model.parameters() if parameter.grad is not None]
        return mse(model(x), y) * (1 + sum(norms))


@feature("Gradients", "a loss that clears the gradients of parameters")
class ClearsGradients(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        model.zero_grad()
        x, y = batch
        return mse(model(x), y)


class HookedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = chain()
        self.layers[0].weight.register_hook(lambda gradient: 0.5 * gradient)
        self.layers[6].weight.register_hook(lambda gradient: 2 * gradient)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@feature("Gradients", "hooks on parameters that scale gradients")
class ParameterHooks(ZooTask):
    def build_model(self) -> nn.Module:
        return HookedModel()


class ClampingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = chain()
        self.layers[2].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@feature("Gradients", "hooks on parameters that clamp gradients", declares=("hook", "gradients"))
class ClampingHooks(ZooTask):
    def build_model(self) -> nn.Module:
        return ClampingModel()


class HookedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = chain()
        self.layers[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0].sign() * 1e-2,))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@feature("Gradients", "a backward hook of a module that is not linear", declares=("hook", "gradients"))
class ModuleHook(ZooTask):
    def build_model(self) -> nn.Module:
        return HookedModule()


class Adjoint(torch.autograd.Function):
    """Steps of an equation, whose backward goes back from the end and runs the module again at every step."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        with torch.no_grad():
            for _ in range(3):
                x = x + 0.1 * module(x)
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *parameters = ctx.saved_tensors
        found = [torch.zeros_like(parameter) for parameter in parameters]
        for _ in range(3):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                slope = ctx.module(x)
            of_x, *each = torch.autograd.grad(slope, (x, *parameters), gradient, allow_unused=True)
            found = [sums if new is None else sums + 0.1 * new for sums, new in zip(found, each, strict=True)]
            x, gradient = x - 0.1 * slope, gradient + 0.1 * of_x
        return None, gradient, *found


class AdjointModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(IN, HIDDEN).double()
        self.slope = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN)).double()
        self.head = nn.Linear(HIDDEN, OUT).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = Adjoint.apply(self.slope, self.encoder(x), *self.slope.parameters())
        return self.head(hidden)


@feature(
    "Gradients", "a function that runs a module again in backward, for the gradients of its parameters (neural ODEs)"
)
class AdjointMethod(ZooTask):
    def build_model(self) -> nn.Module:
        return AdjointModel()


class Normed(torch.autograd.Function):
    """Gives each batch a gradient of the same length, as some layers for unstable losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / (gradient.norm() + 1e-3)


class NormingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh()).double()
        self.head = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUT)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Normed.apply(self.encoder(x)))


@feature("Gradients", "a backward that depends on the whole batch", declares=("gradient",))
class BatchwiseBackward(ZooTask):
    def build_model(self) -> nn.Module:
        return NormingModel()


class Reverse(torch.autograd.Function):
    """A gradient reversal, as domain adaptation uses it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class ReversingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh()).double()
        self.head = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUT)).double()
        self.other = nn.Linear(HIDDEN, OUT).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        return self.head(hidden) + self.other(Reverse.apply(hidden))


@feature("Gradients", "a custom autograd function")
class CustomFunction(ZooTask):
    def build_model(self) -> nn.Module:
        return ReversingModel()


class InPlaceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN).double()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        out += x
        return self.relu(out)


@feature("Gradients", "activations in place (torchvision's ResNets)")
class InPlaceActivations(ZooTask):
    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(IN, HIDDEN).double(), nn.ReLU(inplace=True), InPlaceBlock(), InPlaceBlock(), InPlaceBlock(),
            nn.Linear(HIDDEN, OUT).double(),
        )  # fmt: skip


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, HIDDEN, sparse=True).double()
        self.layers = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUT)).double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embedding(tokens).mean(1))


@feature("Gradients", "an embedding with sparse gradients")
class SparseEmbedding(ZooTask):
    def build_model(self) -> nn.Module:
        return Sparse()

    def train_data(self) -> Any:
        x, y = data()
        return Samples((x * 5).long() % 12, y)

    def eval_data(self) -> Any:
        return None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)


# weights


@feature("Weights", "a max-norm applied to the weights in the loss")
class MaxNormInLoss(ZooTask):
    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        if model.training:
            with torch.no_grad():
                weight = model[2].weight
                weight.mul_(0.9 / weight.norm().clamp_min(0.9))
        return mse(model(x), y)


@feature("Weights", "weights clamped through `.data` in the loss")
class ClampInLoss(ZooTask):
    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        if model.training:
            for parameter in model.parameters():
                parameter.data.clamp_(-0.3, 0.3)
        return mse(model(x), y)


@feature("Weights", "weights clamped in the loss, in an evaluation too")
class ClampInEvaluation(ZooTask):
    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        for parameter in model.parameters():
            parameter.data.clamp_(-0.3, 0.3)
        return mse(model(x), y)


@feature("Weights", "weights changed in the loss from the fourth step on", declares=("buffers learned in forward",))
class LateClampInLoss(ZooTask):
    def build_model(self) -> nn.Module:
        model = chain()
        model.register_buffer("calls", torch.zeros((), dtype=torch.long))
        return model

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        if model.training:
            model.calls += 1
            if model.calls > 3:
                with torch.no_grad():
                    model[0].weight.clamp_(-0.2, 0.2)
        return mse(model(x), y)


@feature("Weights", "a learning rate that decays at every step (`register_step_post_hook`)")
class OptimizerHook(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = super().build_optimizer(model)

        def decay(optimizer: Optimizer, *args: Any) -> None:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9

        optimizer.register_step_post_hook(decay)
        return optimizer


class WithAverage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = chain()
        self.average = chain().requires_grad_(False)
        self.average.load_state_dict(self.layers.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)

    @torch.no_grad()
    def update(self) -> None:
        for mine, theirs in zip(self.average.parameters(), self.layers.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)


@feature("Weights", "an average of the weights kept by an optimiser's hook (EMA)")
class AverageByHook(ZooTask):
    def build_model(self) -> nn.Module:
        return WithAverage()

    def build_optimizer(self, model: Any) -> Optimizer:
        optimizer = SGD(model.layers.parameters(), lr=0.1, momentum=0.9)
        optimizer.register_step_post_hook(lambda *_: model.update())
        return optimizer


@feature("Weights", "a teacher that follows its pupil in the loss", declares=("parameters that the loss writes to",))
class TeacherInLoss(ZooTask):
    def build_model(self) -> nn.Module:
        return WithAverage()

    def build_optimizer(self, model: Any) -> Optimizer:
        return SGD(model.layers.parameters(), lr=0.1, momentum=0.9)

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        if model.training:
            model.update()
        with torch.no_grad():
            target = model.average(x)
        return mse(model(x), y) + 0.1 * mse(model(x), target)


@feature("Weights", "weights unfrozen during the run", declares=("buffers learned in forward",))
class Unfrozen(ZooTask):
    def build_model(self) -> nn.Module:
        model = chain()
        model.register_buffer("calls", torch.zeros((), dtype=torch.long))
        model[2].requires_grad_(False)
        return model

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        if model.training:
            model.calls += 1
            if model.calls == 4:
                model[2].requires_grad_(True)
        return mse(model(x), y)


@feature("Weights", "weights frozen during the run", declares=("buffers learned in forward",))
class Frozen(ZooTask):
    def build_model(self) -> nn.Module:
        model = chain()
        model.register_buffer("calls", torch.zeros((), dtype=torch.long))
        return model

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        if model.training:
            model.calls += 1
            if model.calls == 4:
                model[2].requires_grad_(False)
        return mse(model(x), y)


@feature("Weights", "a module replaced during the run")
class Replaced(ZooTask):
    def build_model(self) -> nn.Module:
        model = chain()
        model.register_buffer("calls", torch.zeros((), dtype=torch.long))
        return model

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        if model.training:
            model.calls += 1
            if model.calls == 4:
                model[6] = nn.Linear(HIDDEN, OUT).double()
        return mse(model(x), y)


class LowRank(nn.Module):
    """A frozen layer with a trained update of rank two beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False).double()
        self.up = nn.Linear(2, base.out_features, bias=False).double()
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@feature("Weights", "a frozen base with small trained updates (LoRA)")
class FrozenBase(ZooTask):
    def build_model(self) -> nn.Module:
        return nn.Sequential(
            LowRank(nn.Linear(IN, HIDDEN).double()), nn.Tanh(), LowRank(nn.Linear(HIDDEN, HIDDEN).double()), nn.Tanh(),
            LowRank(nn.Linear(HIDDEN, OUT).double()),
        )  # fmt: skip

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


@feature("Weights", "weight normalisation (a parametrisation)")
class WeightNorm(ZooTask):
    def build_model(self) -> nn.Module:
        model = chain()
        parametrizations.weight_norm(model[2])
        return model


@feature("Weights", "spectral normalisation (buffers learned in forward)", declares=("buffers learned in forward",))
class SpectralNorm(ZooTask):
    def build_model(self) -> nn.Module:
        model = chain()
        parametrizations.spectral_norm(model[2])
        return model
