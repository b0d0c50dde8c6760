"""Features: state that lies neither in the model's weights nor in the task's own attributes."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

from tests.conformance.zoo.feature import HIDDEN, IN, OUT, Samples, ZooTask, chain, data, feature

CALLS = 0
LOSS = ("state that the loss keeps", "began to change later")


@feature("State elsewhere", "a global variable that the loss counts with", declares=LOSS)
class GlobalVariable(ZooTask):
    def build_model(self) -> nn.Module:
        global CALLS
        CALLS = 0
        return super().build_model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        global CALLS
        CALLS += model.training
        return super().loss(model, batch) * (1 + 0.1 * CALLS)


@feature("State elsewhere", "a class attribute that the loss counts with", declares=LOSS)
class ClassVariable(ZooTask):
    calls: ClassVar[int] = 0

    def build_model(self) -> nn.Module:
        type(self).calls = 0
        return super().build_model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        type(self).calls += model.training
        return super().loss(model, batch) * (1 + 0.1 * self.calls)


class CallsOfClass:
    """A criterion that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        self.calls += torch.is_grad_enabled()
        return functional.mse_loss(output, y) * (1 + 0.1 * self.calls)


@feature("State elsewhere", "a criterion that counts, as an attribute of the task's class", declares=LOSS)
class CriterionOfClass(ZooTask):
    criterion: ClassVar = CallsOfClass()

    def build_model(self) -> nn.Module:
        type(self).criterion = CallsOfClass()
        return super().build_model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return self.criterion(model(x), y)


class Slots:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


@feature(
    "State elsewhere", "an object with `__slots__` that the task counts with", declares=(*LOSS, "no checkpoint holds")
)
class SlottedObject(ZooTask):
    def build_model(self) -> nn.Module:
        self.slots = Slots()
        return super().build_model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.slots.calls += model.training
        return super().loss(model, batch) * (1 + 0.1 * self.slots.calls)


@feature(
    "State elsewhere", "a second model and its optimiser, which the loss steps (GANs)", declares=("mean over", *LOSS)
)
class SecondOptimizer(ZooTask):
    def build_model(self) -> nn.Module:
        self.critic = nn.Linear(OUT, 1).double()
        self.critic_optimizer = SGD(self.critic.parameters(), lr=0.1)
        return super().build_model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        output = model(x)
        if model.training:
            self.critic_optimizer.zero_grad()
            (self.critic(output.detach()).mean() - self.critic(y).mean() + self.critic.weight.square().sum()).backward()
            self.critic_optimizer.step()
        return functional.mse_loss(output, y) + 0.1 * self.critic(output).mean()


@feature("State elsewhere", "a learning rate that the loss lowers", declares=LOSS)
class LearningRateInLoss(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        self.optimizer = super().build_optimizer(model)
        return self.optimizer

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if model.training and hasattr(self, "optimizer"):
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.97
        return super().loss(model, batch)


@feature("State elsewhere", "a schedule that counts its calls")
class CountingSchedule(ZooTask):
    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        calls = [0]

        def factor(samples_seen: int) -> float:
            calls[0] += 1
            return 1 / (1 + 0.1 * calls[0])

        return factor


class Rebinding(SGD):
    """Gives each parameter other memory in every step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data = parameter.data - group["lr"] * parameter.grad


@feature("State elsewhere", "an optimiser that replaces `p.data`")
class RebindingOptimizer(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Rebinding(model.parameters(), lr=0.1)


class Remembering(SGD):
    """Steps along the mean of the last gradients, which it keeps in a list."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    last = self.state[parameter].setdefault("last", [])
                    last.append(parameter.grad.clone())
                    del last[:-3]
                    parameter.sub_(sum(last) / len(last), alpha=group["lr"])


@feature("State elsewhere", "lists of tensors in the optimiser's state")
class ListsOfTensors(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Remembering(model.parameters(), lr=0.1)


class Warm(nn.Module):
    """A layer with a temperature, which others may set."""

    temperature = 1.0

    def __init__(self, given: int = HIDDEN, wanted: int = HIDDEN) -> None:
        super().__init__()
        self.linear = nn.Linear(given, wanted).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) / self.temperature
        return torch.tanh(x) if self.training else x.sigmoid()


@feature("State elsewhere", "an attribute of modules that the loss sets", declares=LOSS)
class SetsAttributes(ZooTask):
    def build_model(self) -> nn.Module:
        return nn.Sequential(Warm(IN), Warm(), Warm(), Warm(HIDDEN, OUT))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        for module in model.modules():
            if isinstance(module, Warm):
                module.temperature = 2.0
        return super().loss(model, batch)


@feature("State elsewhere", "modules that the loss puts into evaluation")
class SetsModes(SetsAttributes):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        list(model.modules())[-2].eval()
        return ZooTask.loss(self, model, batch)


class Sharing(nn.Module):
    """A layer that counts, or reads what another one counts."""

    def __init__(self, given: int, wanted: int, context: dict[str, int], *, counts: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(given, wanted).double()
        self.context = context
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.counts:
            self.context["calls"] += 1
        return torch.tanh(self.linear(x)) * (1 + 0.1 * self.context["calls"])


@feature("State elsewhere", "a dictionary that several modules share", declares=LOSS)
class SharedContext(ZooTask):
    def build_model(self) -> nn.Module:
        context = {"calls": 0}
        return nn.Sequential(
            Sharing(IN, HIDDEN, context, counts=True),
            Sharing(HIDDEN, HIDDEN, context),
            Sharing(HIDDEN, OUT, context),
        )


@feature("State elsewhere", "random numbers in hooks on gradients", declares=("random numbers", "hooks on gradients"))
class NoisyHooks(ZooTask):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient + 0.01 * torch.randn_like(gradient))
        return model


class Decaying(Samples):
    """Samples that shrink whenever they are read."""

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        x.mul_(0.95)
        return x.clone(), y


@feature("State elsewhere", "data that change when they are read", declares=("data: samples that were read twice",))
class ChangingData(ZooTask):
    def train_data(self) -> Any:
        return Decaying(*data())


@feature("State elsewhere", "a loss that uses what `build_optimizer` sets in the task")
class UsesOptimizer(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        self.optimizer = super().build_optimizer(model)
        return self.optimizer

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) * (1 + self.optimizer.param_groups[0]["lr"])


@feature("State elsewhere", "features that a forward hook puts aside for the loss")
class HookedFeatures(ZooTask):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        self.features: dict[str, Tensor] = {}
        model[3].register_forward_hook(lambda module, args, output: self.features.update(middle=output))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) + 0.1 * self.features["middle"].square().mean()


class Scale(nn.Module):
    """Layer with a running scale that is in no `state_dict`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(HIDDEN).double(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.scale.mul_(0.9).add_(0.1 * x.square().mean(0))
        return x / (1 + self.scale)


@feature("State elsewhere", "a buffer learned in forward that is not persistent", declares=("buffers learned", *LOSS))
class NonPersistentBuffer(ZooTask):
    def build_model(self) -> nn.Module:
        model = chain()
        model[1] = nn.Sequential(nn.Tanh(), Scale())
        return model


@feature("State elsewhere", "attributes of the task whose names have dots (averages by parameter)", declares=LOSS)
class DottedAttributes(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        if model.training:
            setattr(self, "calls.of.loss", getattr(self, "calls.of.loss", 0) + 1)
        return super().loss(model, batch) * (1 + 0.1 * getattr(self, "calls.of.loss", 0))


class Heads(nn.Module):
    """Two heads of one shape, of which one is in use."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(HIDDEN, OUT), nn.Linear(HIDDEN, OUT)])

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return self.heads[0](y) + 0.5 * self.heads[1](y)


@feature("State elsewhere", "an attribute that names one part of the model and then another", declares=LOSS)
class PointerToPart(ZooTask):
    def build_model(self) -> nn.Module:
        model = Heads().double()
        self.calls = 0
        self.penalised = model.heads[0]
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.calls += model.training
        if self.calls == 3:
            self.penalised = next(m for m in model.modules() if isinstance(m, nn.ModuleList))[1]
        return super().loss(model, batch) + 0.1 * self.penalised.weight.square().sum()


class Bank(nn.Module):
    """Layer with a memory of its inputs' means, which grows by a row at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(1, HIDDEN).double())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.rows = torch.cat([self.rows, x.detach().mean(0, keepdim=True)])
        return x + 0.1 * self.rows.mean(0)


@feature("State elsewhere", "a buffer that grows by a row at each call", declares=("buffers learned", *LOSS))
class GrowingBuffer(ZooTask):
    def build_model(self) -> nn.Module:
        model = chain()
        model[1] = nn.Sequential(nn.Tanh(), Bank())
        return model


class Numbered(Samples):
    """Samples with their indices, and targets in a list."""

    def __init__(self, *columns: Tensor) -> None:
        super().__init__(*columns)
        self.targets = [*columns[1]]

    def __getitem__(self, index: int) -> Any:
        return index, self.columns[0][index], self.targets[index]


@feature(
    "State elsewhere",
    "targets that the loss corrects in a list of the data set",
    declares=("state that the loss keeps", "state that no checkpoint holds"),
)
class CorrectsTargets(ZooTask):
    def train_data(self) -> Any:
        self.rows = Numbered(*data())
        return self.rows

    def eval_data(self) -> Any:
        return Numbered(*data(7, seed=2))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        index, x, y = batch
        output = model(x)
        if model.training:
            for number, found in zip(index.tolist(), output.detach(), strict=True):
                self.rows.targets[number] = 0.9 * self.rows.targets[number] + 0.1 * found
        return functional.mse_loss(output, y)


@feature("State elsewhere", "a vocabulary that `collate` fills", declares=("state that collate keeps",))
class GrowingVocabulary(ZooTask):
    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    def build_model(self) -> nn.Module:
        first = nn.Sequential(nn.Embedding(40, HIDDEN), nn.Flatten(), nn.Linear(2 * HIDDEN, IN))
        return nn.Sequential(*first, *chain()).double()

    def collate(self, samples: Any) -> Any:
        words = [[int(3 * value) for value in x[:2]] for x, _ in samples]
        rows = [[self.rows.setdefault(word, len(self.rows)) for word in pair] for pair in words]
        return torch.tensor(rows), torch.stack([y for _, y in samples])
