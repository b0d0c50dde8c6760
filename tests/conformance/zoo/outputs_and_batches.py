"""Features: types of outputs and batches, and ways in which the loss calls the model."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import dure
from tests.conformance.zoo.feature import HIDDEN, IN, OUT, Samples, ZooTask, chain, data, feature


class Chain(nn.Module):
    """The plain chain inside a module, whose output a subclass packs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain()

    def pack(self, y: Tensor) -> Any:
        return y

    def forward(self, x: Tensor) -> Any:
        return self.pack(self.layers(x))


def mse(output: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(output, y)


# outputs


class DictModel(Chain):
    def pack(self, y: Tensor) -> Any:
        return {"logits": y, "twice": 2 * y}


@feature("Outputs", "the model returns a dict")
class OutputDict(ZooTask):
    def build_model(self) -> nn.Module:
        return DictModel()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        output = model(batch[0])
        return mse(output["logits"], batch[1]) + 0.1 * mse(output["twice"], batch[1])


@dataclass
class Answer:
    logits: Tensor
    note: str = "fine"


class DataclassModel(Chain):
    def pack(self, y: Tensor) -> Any:
        return Answer(y)


@feature("Outputs", "the model returns a dataclass")
class OutputDataclass(ZooTask):
    def build_model(self) -> nn.Module:
        return DataclassModel()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return mse(model(batch[0]).logits, batch[1])


class ModelOutput(OrderedDict[str, Any]):
    """A mapping whose entries are attributes too, as in transformers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class ModelOutputModel(Chain):
    def pack(self, y: Tensor) -> Any:
        return ModelOutput(logits=y, hidden=(y, y + 1))


@feature("Outputs", "the model returns a mapping with attributes (Hugging Face's `ModelOutput`)")
class OutputMapping(ZooTask):
    def build_model(self) -> nn.Module:
        return ModelOutputModel()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        output = model(batch[0])
        return mse(output.logits, batch[1]) + 0.1 * mse(output.hidden[1], batch[1])


class Pair(NamedTuple):
    mean: Tensor
    scale: Tensor | None


class NamedTupleModel(Chain):
    def pack(self, y: Tensor) -> Any:
        return Pair(y, None)


@feature("Outputs", "the model returns a named tuple with `None` in it")
class OutputNamedTuple(ZooTask):
    def build_model(self) -> nn.Module:
        return NamedTupleModel()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return mse(model(batch[0]).mean, batch[1])


class Distribution:
    """An object of the model's own, which nothing knows how to take apart."""

    def __init__(self, mean: Tensor) -> None:
        self.mean = mean


class ObjectModel(Chain):
    def pack(self, y: Tensor) -> Any:
        return Distribution(y)


@feature("Outputs", "the model returns an object of a class of its own")
class OutputObject(ZooTask):
    def build_model(self) -> nn.Module:
        return ObjectModel()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return mse(model(batch[0]).mean, batch[1])


class TimeFirstModel(Chain):
    def pack(self, y: Tensor) -> Any:
        return torch.stack([y, y + 1])


@feature("Outputs", "the output's first dimension is not the samples")
class OutputTimeFirst(ZooTask):
    def build_model(self) -> nn.Module:
        return TimeFirstModel()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        output = model(batch[0])
        return mse(output[0], batch[1]) + 0.1 * mse(output[1], batch[1])


class OwnLossModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = chain()

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.layers(x)
        return ModelOutput(loss=mse(logits, labels), logits=logits)


@feature("Outputs", "the model computes its own loss from labels")
class OwnLoss(ZooTask):
    def build_model(self) -> nn.Module:
        return OwnLossModel()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0], labels=batch[1]).loss


class StatisticModel(Chain):
    def pack(self, y: Tensor) -> Any:
        return y, y.mean(0)


@feature("Outputs", "the model returns a statistic of the batch beside its rows", declares=("mean over samples",))
class OutputStatistic(ZooTask):
    def build_model(self) -> nn.Module:
        return StatisticModel()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        rows, mean = model(batch[0])
        return mse(rows, batch[1]) + mean.square().sum()


# batches


@feature("Batches", "the batch is a dict")
class BatchDict(ZooTask):
    def collate(self, samples: Any) -> Any:
        return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return mse(model(batch["x"]), batch["y"])


@dataclass(frozen=True)
class Batch:
    x: Tensor
    y: Tensor


@feature("Batches", "the batch is a frozen dataclass")
class BatchDataclass(ZooTask):
    def collate(self, samples: Any) -> Any:
        return Batch(torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return mse(model(batch.x), batch.y)


class Encoding(UserDict[str, Any]):
    """A mapping with attributes and a `to` of its own, as transformers' `BatchEncoding`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: Any, **kwargs: Any) -> "Encoding":
        return Encoding({name: value.to(device, **kwargs) for name, value in self.data.items()})


@feature("Batches", "the batch is a mapping with attributes (Hugging Face's `BatchEncoding`)")
class BatchMapping(ZooTask):
    def collate(self, samples: Any) -> Any:
        return Encoding(x=torch.stack([x for x, _ in samples]), y=torch.stack([y for _, y in samples]))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return mse(model(batch.x), batch.y)


@feature("Batches", "the model takes the whole mapping (`model(**batch)`)")
class BatchUnpacked(ZooTask):
    def build_model(self) -> nn.Module:
        return OwnLossModel()

    def collate(self, samples: Any) -> Any:
        return Encoding(x=torch.stack([x for x, _ in samples]), labels=torch.stack([y for _, y in samples]))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        output = model(**batch)
        return mse(output.logits, batch.labels)


class RaggedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = chain()

    def forward(self, rows: list[Tensor]) -> Tensor:
        return torch.stack([self.layers(row).mean(0) for row in rows])


@feature("Batches", "the batch is a list of tensors of different lengths")
class BatchRagged(ZooTask):
    def build_model(self) -> nn.Module:
        return RaggedModel()

    def collate(self, samples: Any) -> Any:
        rows = [x.expand(1 + int(abs(x[0]) * 2), IN) for x, _ in samples]
        return rows, torch.stack([y for _, y in samples])

    def loss(self, model: nn.Module, batch: Any) -> Any:
        rows, y = batch
        return mse(model(rows), y)


@feature("Batches", "the batch holds a table that is not divided by samples")
class BatchWithTable(ZooTask):
    def collate(self, samples: Any) -> Any:
        x, y = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
        return x, y, torch.linspace(0.5, 1.5, OUT, dtype=x.dtype)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y, weights = batch
        return ((model(x) - y).square() * weights).mean()


# calls of the model


@feature("Calls", "the loss calls the model twice")
class SeveralCalls(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return mse(model(x), y) + 0.3 * mse(model(-x), -y)


class EncoderAndHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh()).double()
        self.head = nn.Linear(HIDDEN, OUT).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


@feature("Calls", "the loss calls parts of the model, not the model")
class CallsOfParts(ZooTask):
    def build_model(self) -> nn.Module:
        return EncoderAndHead()

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return mse(model.head(model.encoder(x)), y)


@feature("Calls", "the loss uses parameters outside of a call (an L2 penalty)")
class PenaltyOfParameters(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return mse(model(x), y) + 0.01 * sum(p.square().sum() for p in model.parameters())


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh()).double()
        self.head = nn.Linear(HIDDEN, OUT).double()
        self.scale = nn.Linear(HIDDEN, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


@feature("Calls", "a module of the model is used by the loss alone")
class HeadInLoss(ZooTask):
    def build_model(self) -> nn.Module:
        return Heads()

    def loss(self, model: Any, batch: Any) -> Any:
        x, y = batch
        return mse(model(x), y) + 0.1 * model.scale(model.encoder(x)).square().mean()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(IN, IN).double()
        self.middle = nn.Sequential(nn.Linear(IN, IN), nn.Tanh(), nn.Linear(IN, IN), nn.Tanh()).double()
        self.head = nn.Linear(IN, IN).double()
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(torch.tanh(self.embed(x))))[:, :OUT]


@feature("Calls", "tied weights")
class TiedWeights(ZooTask):
    def build_model(self) -> nn.Module:
        return Tied()


class WithUnused(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(IN, IN).double()


@feature("Calls", "parameters that never take part")
class UnusedParameters(ZooTask):
    def build_model(self) -> nn.Module:
        return WithUnused()


class Branching(nn.Module):
    """Rows of a batch decide which expert is used: some steps, and some ranks, use one of them only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, HIDDEN).double()
        self.left = nn.Linear(HIDDEN, OUT).double()
        self.right = nn.Linear(HIDDEN, OUT).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        is_left = x[:, 0] > 0
        out = hidden.new_zeros(len(x), OUT)
        if is_left.any():
            out = out.index_put((is_left.nonzero()[:, 0],), self.left(hidden[is_left]))
        if not is_left.all():
            out = out.index_put(((~is_left).nonzero()[:, 0],), self.right(hidden[~is_left]))
        return out


@feature("Calls", "branches that depend on the data (experts)")
class DataDependentBranch(ZooTask):
    def build_model(self) -> nn.Module:
        return Branching()


class Rare(nn.Module):
    """One expert is called for few samples, none of them among the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain()
        self.rare = nn.Linear(IN, OUT).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        is_rare = x[:, 0].abs() > 1.5
        return y + self.rare(x) * is_rare[:, None] if is_rare.any() else y


@feature("Calls", "a module that the first samples do not use")
class RareModule(ZooTask):
    def build_model(self) -> nn.Module:
        return Rare()

    def train_data(self) -> Any:
        x, y = data()
        x[:6, 0] = x[:6, 0].clamp(-1, 1)
        return Samples(x, y)


@feature("Calls", "a loss of sums and counts (`dure.Sum`)")
class SumAndCount(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        weight = (x[:, :1] > 0).double() + 0.5
        return dure.Sum(((model(x) - y).square() * weight).sum(), weight.sum())


@feature("Calls", "a loss that is a mean over something else than samples", declares=("mean over samples",))
class MeanOverItems(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        mask = (x[:, 0] > 0).double()
        return ((model(x) - y).square().mean(1) * mask).sum() / mask.sum().clamp_min(1)


@feature("Calls", "a loss that compares the samples of a batch (contrastive)", declares=("mean over samples",))
class Contrastive(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        scores = model(x) @ y.T
        return functional.cross_entropy(scores, torch.arange(len(x), device=x.device))


@feature("Calls", "a loss that is a sum, not a mean", declares=("mean over samples",))
class SumWithoutCount(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        return 0.1 * (model(batch[0]) - batch[1]).square().sum()
