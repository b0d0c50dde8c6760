"""Features: trainings as people write them every day, with state in several places at once."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import dure
from tests.conformance.zoo.feature import HIDDEN, IN, OUT, Samples, ZooTask, chain, data, feature


class Wrapper(Optimizer):
    """Clips, and steps by another optimiser, whose groups and state are its own."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        return self.inner.step(closure)


@feature("Optimisers", "an optimiser that clips, and steps by another one")
class WrappedOptimizer(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return Wrapper(Adam(model.parameters(), lr=0.01))


class LoRALinear(nn.Module):
    """A frozen layer with a trained addition of low rank, which is merged into it while it is evaluated."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=torch.float64) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2, dtype=torch.float64))
        self.is_merged = False

    def train(self, mode: bool = True) -> "LoRALinear":
        super().train(mode)
        if mode is self.is_merged:
            self.base.weight.data += (-1 if mode else 1) * self.up.data @ self.down.data
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) if self.is_merged else self.base(x) + x @ self.down.T @ self.up.T


@feature("Weights", "additions that `eval()` merges into frozen weights, and `train()` takes out again (LoRA)")
class MergedAdditions(ZooTask):
    def build_model(self) -> nn.Module:
        layers = [nn.Linear(IN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, OUT)]
        first, second, third = (LoRALinear(layer.double()) for layer in layers)
        return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class Graded(Samples):
    """Samples that become harder with the level."""

    level = 0.0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * (1 + self.level), y


@feature("State elsewhere", "a schedule that sets how hard the data set is (a curriculum)")
class CurriculumBySchedule(ZooTask):
    def train_data(self) -> Any:
        self.samples = Graded(*data())
        return self.samples

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        def factor(seen: int) -> float:
            self.samples.level = 0.5 * (seen // 11)
            return 1.0

        return factor


class Rotary(nn.Module):
    """A table of positions that is made as long as the longest sequence so far."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(IN, HIDDEN).double()
        self.head = nn.Linear(HIDDEN, OUT).double()
        self.length = 0

    def forward(self, x: Tensor, length: int) -> Tensor:
        if length > self.length:
            self.length = length
            table = torch.arange(length * HIDDEN, dtype=x.dtype, device=x.device).reshape(length, HIDDEN).cos()
            self.register_buffer("table", table, persistent=False)
        return self.head(torch.tanh(self.embedding(x) + self.table[length - 1]))


@feature("State", "a buffer that forward registers, and makes longer (rotary positions)")
class GrowingTable(ZooTask):
    def build_model(self) -> nn.Module:
        return Rotary()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        outputs = [model(row[None], 1 + int(row[0].abs() * 4)) for row in x]
        return functional.mse_loss(torch.cat(outputs), y)


@feature("State", "an average of the weights that the schedule keeps, and the metrics read (EMA)")
class AverageBySchedule(ZooTask):
    def build_model(self) -> nn.Module:
        self.model = super().build_model()
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return self.model

    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        def factor(seen: int) -> float:
            self.average.update_parameters(self.model)
            return 1.0

        return factor

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, dure.Sum]:
        x, y = batch
        return {"averaged": dure.Sum(functional.mse_loss(self.average(x), y, reduction="sum"), y.numel())}


@feature(
    "State",
    "a hidden state that goes from batch to batch (truncated backpropagation)",
    declares=("state", "mean over samples"),
)
class HiddenState(ZooTask):
    def build_model(self) -> nn.Module:
        self.hidden: Tensor | None = None
        return Cells()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        hidden = self.hidden if self.hidden is not None and len(self.hidden) == len(x) else x.new_zeros(len(x), HIDDEN)
        output, hidden = model(x, hidden)
        self.hidden = hidden.detach()
        return functional.mse_loss(output, y)


@feature("Weights", "a loss that takes the weights from the optimiser's groups (a penalty)")
class PenaltyByGroups(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        self.optimizer = super().build_optimizer(model)
        return self.optimizer

    def loss(self, model: nn.Module, batch: Any) -> Any:
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        return super().loss(model, batch) * (1 + 0.1 * sum(p.detach().square().sum() for p in weights))


class Cells(nn.Module):
    """A recurrent cell and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(IN, HIDDEN).double()
        self.head = nn.Linear(HIDDEN, OUT).double()

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.cell(x, hidden)
        return self.head(hidden), hidden


@feature("Calls", "a contrastive loss of two calls with dropout (SimCSE)", declares=("random", "mean over samples"))
class ContrastiveDropout(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, _ = batch
        one, other = (functional.normalize(model(functional.dropout(x, 0.2)), dim=1) for _ in range(2))
        return functional.cross_entropy(one @ other.T / 0.5, torch.arange(len(x), device=x.device))


class CompiledBetween(nn.Module):
    """Two layers, and between them a function that `torch.compile` made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(IN, HIDDEN).double(), nn.Linear(HIDDEN, OUT).double()
        self.activation = torch.compile(lambda x: functional.gelu(x) * x.sigmoid(), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.activation(self.first(x)))


@feature("Calls", "a function between layers that `torch.compile` made")
class CompiledFunction(ZooTask):
    def build_model(self) -> nn.Module:
        return CompiledBetween()


@feature("Calls", "a model in the wrapper of `torch.compile`")
class CompiledModel(ZooTask):
    def build_model(self) -> nn.Module:
        return torch.compile(super().build_model(), backend="eager")


class Observer(nn.Module):
    """Limits its inputs by the highest that it has seen of each feature, as observers of quantisation know them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("highest", torch.tensor([], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            seen = x.detach().abs().amax(0)
            is_first = self.highest.numel() == 0
            self.highest.resize_(seen.shape).copy_(seen if is_first else torch.maximum(self.highest, seen))
        return torch.minimum(x, 0.8 * self.highest) if self.highest.numel() else x


@feature("State", "a buffer that forward resizes in place (observers of quantisation)", declares=("buffers learned",))
class ResizedBuffer(ZooTask):
    def build_model(self) -> nn.Module:
        first, *others = chain()
        return nn.Sequential(first, Observer(), *others)


@feature("State", "losses of the samples that the task keeps on the host", declares=("state that the loss keeps",))
class TableOnHost(ZooTask):
    def train_data(self) -> Any:
        x, y = data()
        self.losses = torch.ones(len(x), dtype=torch.float64)
        return Samples(x, y, torch.arange(len(x)))

    def eval_data(self) -> Any:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y, places = batch
        losses = functional.mse_loss(model(x), y, reduction="none").mean(1)
        places = places.cpu()
        before = self.losses[places].to(x.device)
        if model.training:
            self.losses[places] = 0.5 * self.losses[places] + 0.5 * losses.detach().cpu()
        return (losses * before).mean()


@feature(
    "Calls",
    "the worst twentieth of a batch left out, which in a rank's share is no sample",
    declares=("the loss is no mean over samples",),
    global_batch_size=22,
    samples=198,
)
class WorstLeftOut(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        losses = functional.mse_loss(model(x), y, reduction="none").mean(1)
        return losses.sort().values[: len(x) - int(0.05 * len(x))].mean()


class LeavesOut(SGD):
    """Leaves out parameters whose gradient is zero, momentum and decay included."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not parameter.grad.any():
                    parameter.grad = None
        return super().step(closure)


@feature("Optimisers", "an optimiser that leaves out tensors whose gradient is zero")
class ZerosLeftOut(ZooTask):
    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(20, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, OUT)
        ).double()

    def train_data(self) -> Any:
        x, y = data()
        return Samples((x[:, 0] > 0).long() + 10 * (torch.arange(len(x)) % 7 == 0), y)

    def eval_data(self) -> Any:
        return None

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return LeavesOut(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


@feature("Weights", "weights that the loss limits by a function of lists, and by `out=`")
class LimitedTogether(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        if model.training:
            weights = [*model.parameters()]
            with torch.no_grad():
                torch._foreach_clamp_max_(weights, 0.3)
                for weight in weights:
                    torch.clamp(weight, min=-0.3, out=weight)
        return functional.mse_loss(model(x), y)


class Room(nn.Module):
    """Expert with room for half of a batch, in the order of its samples."""

    def forward(self, x: Tensor) -> Tensor:
        comes = x[:, 0] > 0
        return torch.where((comes & (comes.cumsum(0) <= -(-len(x) // 2)))[:, None], x.relu(), x)


@feature("Calls", "an expert that takes a limited number of a batch's samples", declares=("mean over samples",))
class LimitedRoom(ZooTask):
    def build_model(self) -> nn.Module:
        model = chain()
        model[3] = Room()
        return model
