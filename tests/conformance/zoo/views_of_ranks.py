"""Features: tasks that know of ranks, call them, or keep copies of the model, and hooks that come late."""

import copy
import io
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.optim import SGD, Optimizer

import dure
from tests.conformance.zoo.feature import HIDDEN, OUT, Samples, ZooTask, chain, data, feature

RANK = ("depends on the rank",)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


@feature("Ranks and copies", "a loss that reads the number of the rank", declares=RANK)
class RankInLoss(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return super().loss(model, batch) * (1 + 0.5 * rank())


@feature("Ranks and copies", "a model that reads the number of the rank", declares=RANK)
class RankInModel(ZooTask):
    def build_model(self) -> nn.Module:
        model, scale = chain(), 1.0 + rank()
        model.register_forward_hook(lambda module, args, output: output * scale)
        return model


@feature("Ranks and copies", "data of which each rank reads its own part")
class RankInData(ZooTask):
    def train_data(self) -> Any:
        x, y = data()
        order = torch.arange(len(x)).roll(rank())
        return Samples(x[order], y[order])


@feature("Ranks and copies", "evaluation data of which each rank reads its own part")
class RankInEvaluation(ZooTask):
    def eval_data(self) -> Any:
        x, y = data(7, seed=2 + rank())
        return Samples(x, y)


@feature("Ranks and copies", "a learning rate by the number of the rank")
class RankInRate(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1 * (1 + rank()), momentum=0.9)


@feature("Ranks and copies", "an `all_reduce` of the loss's own")
class OwnCollective(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        count = torch.tensor(float(len(x)), dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(count)
        return functional.mse_loss(model(x), y, reduction="sum") / count


@feature("Ranks and copies", "metrics that are reduced over ranks by the task")
class CollectiveInMetrics(ZooTask):
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        total = (model(x) - y).abs().sum()
        if dist.is_initialized():
            dist.all_reduce(total)
        return {"error": dure.Sum(total, y.numel())}


@feature("Ranks and copies", "a copy of the model made in `build_optimizer`, as a teacher")
class CopyOfModel(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        self.teacher = copy.deepcopy(model).requires_grad_(False)
        return super().build_optimizer(model)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        output = model(x)
        return functional.mse_loss(output, y) + 0.3 * functional.mse_loss(output, self.teacher(x))


@feature("Ranks and copies", "copies of weights made in `build_optimizer`, to stay near them (EWC, L2-SP)")
class CopiesOfWeights(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        self.anchors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        return super().build_optimizer(model)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        distance = sum((p - self.anchors[name]).square().sum() for name, p in model.named_parameters())
        return super().loss(model, batch) + 0.3 * distance


@feature("Ranks and copies", "a copy of the model made in each call of the loss")
class CopyInLoss(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.01)
            target = other(batch[0])
        return super().loss(model, batch) + 0.3 * functional.mse_loss(model(batch[0]), target)


@feature("Ranks and copies", "`torch.func.vmap` over samples")
class Vmap(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        def of_one(x: Tensor, y: Tensor) -> Tensor:
            return functional.mse_loss(model(x), y)

        return torch.func.vmap(of_one)(*batch).mean()


@feature("Ranks and copies", "calls of the model with one sample, without a dimension for the batch")
class OneSample(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return torch.stack([functional.mse_loss(model(x), y) for x, y in zip(*batch, strict=True)]).mean()


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


@feature("Ranks and copies", "`parametrize.cached()` around two calls of the model")
class CachedParametrization(ZooTask):
    def build_model(self) -> nn.Module:
        model = chain()
        parametrize.register_parametrization(model[2], "weight", Symmetric())
        return model

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        with parametrize.cached():
            return functional.mse_loss(model(x), y) + 0.1 * functional.mse_loss(model(-x), y)


@feature("Ranks and copies", "noise by a forward hook that `build_optimizer` registers", declares=("random numbers",))
class NoiseHookOfOptimizer(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        model[2].register_forward_hook(
            lambda module, args, output: output * (1 + 0.1 * torch.rand_like(output)) if module.training else output
        )
        return super().build_optimizer(model)


@feature("Ranks and copies", "hooks on gradients that the first call of the loss registers", declares=("hooks on",))
class HooksOfLoss(ZooTask):
    def build_model(self) -> nn.Module:
        self.has_hooks = False
        return super().build_model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if not self.has_hooks:
            self.has_hooks = True
            for parameter in model.parameters():
                parameter.register_hook(lambda gradient: 0.5 * gradient.clamp(-0.01, 0.01))
        return super().loss(model, batch)


class StepsInBackward(SGD):
    """Leaves the steps to hooks."""

    def step(self, closure: Any = None) -> Any:
        return None


@feature(
    "Ranks and copies", "optimisers that step in backward, one for each parameter", declares=("written for every part",)
)
class OptimizerInBackward(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        own = {parameter: SGD([parameter], lr=0.1) for parameter in model.parameters()}

        def step(parameter: Tensor) -> None:
            own[parameter].step()
            own[parameter].zero_grad()

        for parameter in own:
            parameter.register_post_accumulate_grad_hook(step)
        return StepsInBackward(model.parameters(), lr=0.1)


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


WORLD = ("depends on the number of ranks",)


@feature("Ranks and copies", "a learning rate scaled by the number of ranks", declares=WORLD)
class RateByWorldSize(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.05 * world_size(), momentum=0.9)


@feature("Ranks and copies", "a batch that `collate` scales by the number of ranks", declares=WORLD)
class BatchByWorldSize(ZooTask):
    def collate(self, samples: Any) -> Any:
        x, y = super().collate(samples)
        return x * (0.9 + 0.1 * world_size()), y


@feature("Ranks and copies", "a schedule by the number of ranks", declares=WORLD)
class ScheduleByWorldSize(ZooTask):
    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        slope = 0.2 * int(os.environ.get("WORLD_SIZE", "1"))
        return lambda samples_seen: max(0.0, 1 - slope * samples_seen / 49)


@feature("Ranks and copies", "a schedule by the number of the rank")
class ScheduleByRank(ZooTask):
    def build_schedule(self, optimizer: Optimizer, total_samples: int) -> Any:
        slope = 0.2 * rank()
        return lambda samples_seen: max(0.0, 1 - slope * samples_seen / 49)


@feature("Ranks and copies", "a hook on the optimiser's step that adds gradients up over ranks")
class ReducingStepHook(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = super().build_optimizer(model)

        def reduce(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            for parameter in model.parameters() if dist.is_initialized() else ():
                dist.all_reduce(parameter.grad)

        optimizer.register_step_pre_hook(reduce)
        return optimizer


@feature("Ranks and copies", "a new head given to the model in `build_optimizer`")
class HeadOfOptimizer(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        model[6] = nn.Linear(HIDDEN, OUT).double()
        with torch.no_grad():
            for parameter in model[6].parameters():
                parameter.fill_(0.1)
        return super().build_optimizer(model)


@feature("Ranks and copies", "parameters given to the optimiser in the order of a set")
class ParametersInSet(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(list(set(model.parameters())), lr=0.1, momentum=0.9)


@feature("Ranks and copies", "a term that begins after so many samples, which the task counts", declares=("task.seen",))
class CountedSamples(ZooTask):
    def build_model(self) -> nn.Module:
        self.seen = 0
        return super().build_model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.seen += len(batch[0]) * model.training
        decay = sum(parameter.square().sum() for parameter in model.parameters()) if self.seen > 25 else 0.0
        return super().loss(model, batch) + 0.01 * decay


@feature(
    "Ranks and copies", "a `forward` that is replaced on the way", declares=("forward changed on the way", "task.calls")
)
class ForwardReplacedLater(ZooTask):
    def build_model(self) -> nn.Module:
        self.calls = 0
        return super().build_model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.calls += model.training
        if self.calls == 4:
            forward = model[1].forward
            model[1].forward = lambda x: 1.2 * forward(x)
        return super().loss(model, batch)


class Criterion(nn.Module):
    """A module that refers to the model, as wrappers and extractors of features do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.mse_loss(self.model(x), y)


@feature("Ranks and copies", "a module of the task's that refers to the model")
class WrapperOfModel(ZooTask):
    def build_model(self) -> nn.Module:
        model = chain()
        self.criterion = Criterion(model)
        return model


class Hybrid(nn.Module):
    """A layer that has the name of an option of `nn.Embedding`."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse, self.dense = chain(), nn.Linear(OUT, OUT).double()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.dense(self.sparse(x))
        return output


@feature("Ranks and copies", "a layer with the name `sparse`")
class LayerNamedSparse(ZooTask):
    def build_model(self) -> nn.Module:
        return Hybrid()


@feature("Ranks and copies", "an event that a thread of the task's sets, and the loss waits for")
class EventOfThread(ZooTask):
    def build_model(self) -> nn.Module:
        self.is_ready = threading.Event()
        threading.Thread(target=self.get_ready, daemon=True).start()
        return super().build_model()

    def get_ready(self) -> None:
        time.sleep(0.3)
        self.is_ready.set()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        assert self.is_ready.wait(20)
        return super().loss(model, batch)


@feature("Ranks and copies", "a number that the task keeps in an `io.BytesIO`", declares=("task.file",))
class FileInMemory(ZooTask):
    def build_model(self) -> nn.Module:
        self.file = io.BytesIO(b"1.0")
        return super().build_model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        factor = min(float(self.file.getvalue()) + 0.1 * model.training, 2.0)
        self.file.seek(0)
        self.file.write(f"{factor:.1f}".encode())
        return super().loss(model, batch) * factor


class ReducedNorm(SGD):
    """Divides gradients by a norm that it adds up over ranks, as where each has its own part of them."""

    def step(self, closure: Any = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        square = torch.stack([parameter.grad.square().sum() for parameter in parameters]).sum()
        if dist.is_initialized():
            dist.all_reduce(square)
        for parameter in parameters:
            parameter.grad.div_(1 + square.sqrt())
        return super().step(closure)


@feature("Ranks and copies", "an optimiser that adds a norm up over ranks", declares=WORLD)
class NormOverRanks(ZooTask):
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return ReducedNorm(model.parameters(), lr=0.1)


@feature("Ranks and copies", "data cut to a multiple of the number of ranks", declares=WORLD)
class DataByWorldSize(ZooTask):
    def train_data(self) -> Any:
        whole = super().train_data()
        multiple = world_size() ** 3
        return torch.utils.data.Subset(whole, range(len(whole) // multiple * multiple))


@feature("Ranks and copies", "first weights scaled by the number of ranks", declares=WORLD)
class WeightsByWorldSize(ZooTask):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.1 * world_size())
        return model


@feature("Ranks and copies", "a learning rate that the task keeps, scaled by the number of ranks", declares=WORLD)
class KeptRateByWorldSize(ZooTask):
    def build_model(self) -> nn.Module:
        self.rate = 0.05 * world_size()
        return super().build_model()

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=self.rate, momentum=0.9)


@feature("Ranks and copies", "the number of ranks kept by the task for its messages")
class KeptWorldSize(ZooTask):
    def train_data(self) -> Any:
        self.num_ranks = world_size()
        return super().train_data()


@feature("Calls", "a loss that takes the targets out of the batch and scales them in place")
class ChangesBatch(ZooTask):
    def collate(self, samples: Any) -> Any:
        x, y = super().collate(samples)
        return {"x": x, "y": y}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        y = batch.pop("y").mul_(0.5)
        return functional.mse_loss(model(batch["x"]), y)


@feature("Gradients", "metrics that run a backward pass", eval_every_epochs=1)
class BackwardInMetrics(ZooTask):
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            functional.mse_loss(model(x), y).backward()
        return {"slope": dure.Sum(0 if x.grad is None else x.grad.abs().sum(), len(x))}


class Ring(list[float]):
    """A list that knows its next place."""

    at = 0


@feature("State elsewhere", "an attribute of a list of the task's own class", declares=("state that",))
class AttributeOfList(ZooTask):
    def build_model(self) -> nn.Module:
        self.ring = Ring([1.0, 1.1, 1.2, 1.3])
        return super().build_model()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if model.training:
            self.ring.at = (self.ring.at + 1) % len(self.ring)
        return super().loss(model, batch) * self.ring[self.ring.at]
