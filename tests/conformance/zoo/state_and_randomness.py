"""Features: state that the model or the task keeps, and random numbers wherever they are drawn."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import dure
from tests.conformance.zoo.feature import HIDDEN, IN, OUT, Samples, ZooTask, chain, data, feature


def mse(output: Tensor, y: Tensor) -> Tensor:
    return functional.mse_loss(output, y)


class Centred(nn.Module):
    """Subtracts a running mean that it learns from the batches it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(HIDDEN, dtype=torch.float64))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.2)
        return x - self.mean


def with_layer(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(IN, HIDDEN).double(), nn.Tanh(), layer, nn.Linear(HIDDEN, HIDDEN).double(), nn.Tanh(),
        nn.Linear(HIDDEN, OUT).double(),
    )  # fmt: skip


@feature("State", "a buffer learned in forward", declares=("buffer",))
class LearnedBuffer(ZooTask):
    def build_model(self) -> nn.Module:
        return with_layer(Centred())


class CentredByData(Centred):
    """Learns through `.data`, as the averages of a codebook are often written."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.data.mul_(0.8).add_(x.data.mean(0), alpha=0.2)
        return x - self.mean


@feature("State", "a buffer learned in forward through `.data` (the codebook of a VQ-VAE)", declares=("buffer",))
class BufferThroughData(ZooTask):
    def build_model(self) -> nn.Module:
        return with_layer(CentredByData())


@feature("State", "BatchNorm", declares=("BatchNorm",), drop_last=True)
class BatchNorm(ZooTask):
    def build_model(self) -> nn.Module:
        return with_layer(nn.BatchNorm1d(HIDDEN).double())


@feature("State", "BatchNorm, and a batch that leaves a device one sample", declares=("BatchNorm",))
class BatchNormOfOne(BatchNorm):  # type: ignore[valid-type,misc]
    pass


class OwnNorm(nn.Module):
    """Normalises by the batch in training, and keeps nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0, unbiased=False) + 0.1) if self.training else x


@feature("State", "a layer that looks at the whole batch in training", declares=("mean over samples",))
class BatchStatistics(ZooTask):
    def build_model(self) -> nn.Module:
        return with_layer(OwnNorm())


class Counting(nn.Module):
    """Counts its calls in a buffer, and does something with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x * (1 + 0.05 * self.calls)


@feature("State", "a buffer that counts steps", declares=("buffers learned in forward",))
class CountingBuffer(ZooTask):
    def build_model(self) -> nn.Module:
        return with_layer(Counting())


class Remembering(nn.Module):
    """Keeps a Python number, which its extra state carries."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x * (1 + 0.05 * self.calls)


@feature("State", "extra state of a module (`get_extra_state`)", declares=("state that the loss keeps",))
class ExtraState(ZooTask):
    def build_model(self) -> nn.Module:
        return with_layer(Remembering())


class Forgetful(nn.Module):
    """Keeps a Python number that no state dict knows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x * (1 + 0.05 * self.calls)


@feature("State", "a plain attribute of a module that changes in forward", declares=("state that the loss keeps",))
class PlainAttribute(ZooTask):
    def build_model(self) -> nn.Module:
        return with_layer(Forgetful())


class Tensors(nn.Module):
    """Keeps a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros((), dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = x * (1 + 0.1 * torch.tanh(self.last))
        if self.training:
            self.last = self.last + 0.3
        return y


@feature("State", "a tensor attribute of a module that changes in forward", declares=("state that the loss keeps",))
class TensorAttribute(ZooTask):
    def build_model(self) -> nn.Module:
        return with_layer(Tensors())


@feature("State", "a counter of the task's own", declares=("state that the loss keeps",))
class TaskCounter(ZooTask):
    calls = 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        if model.training:
            self.calls += 1
        return mse(model(x), y) * (1 + 0.1 * self.calls)


@feature("State", "an attribute that the loss gives a parameter", declares=("state that the loss keeps",))
class ParameterAttribute(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        weight: Any = next(model.parameters())
        if model.training:
            weight.calls = getattr(weight, "calls", 0) + 1
        return mse(model(x), y) * (1 + 0.1 * getattr(weight, "calls", 0))


@feature("State", "a column of the outputs that the task keeps", declares=("state that the loss keeps",))
class OutputColumn(ZooTask):
    last = None

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        output = model(x)
        self.last = output[:, 0].detach()
        return mse(output, y)


@feature(
    "State",
    "a running mean of the loss that the task keeps",
    declares=("state that the loss keeps", "mean over samples"),
)
class TaskAverage(ZooTask):
    average = None

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        loss = mse(model(x), y)
        if model.training:
            now = loss.detach()
            self.average = now if self.average is None else 0.9 * self.average + 0.1 * now
            return loss * (1 + self.average)
        return loss


class Meter:
    """An object of the task's own, whose inside changes."""

    def __init__(self) -> None:
        self.count = 0


@feature("State", "an object that the task keeps and changes", declares=("state that the loss keeps",))
class TaskObject(ZooTask):
    def build_model(self) -> nn.Module:
        self.meter = Meter()
        return chain()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        if model.training:
            self.meter.count += 1
        return mse(model(x), y) * (1 + 0.1 * self.meter.count)


@feature("State", "state that the task saves itself (`state_dict`)", declares=("state that the loss keeps",))
class TaskStateDict(ZooTask):
    def build_model(self) -> nn.Module:
        self.meter = Meter()
        return chain()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.meter.count}

    def load_state_dict(self, state: Any) -> None:
        self.meter.count = state["count"]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        if model.training:
            self.meter.count += 1
        return mse(model(x), y) * (1 + 0.1 * self.meter.count)


class Stream:
    """A position in an iterator, which cannot be written down."""

    def __init__(self) -> None:
        self.numbers = iter(range(1000))


@feature("State", "a task that holds an iterator", declares=("unknown", "state that no checkpoint holds"))
class TaskIterator(ZooTask):
    def build_model(self) -> nn.Module:
        self.stream = Stream()
        return chain()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        number = next(self.stream.numbers) if model.training else 0
        return mse(model(x), y) * (1 + 0.01 * number)


# random numbers


@feature("Random numbers", "dropout", declares=("random numbers",))
class Dropout(ZooTask):
    def build_model(self) -> nn.Module:
        return with_layer(nn.Dropout(0.3))


class FunctionalDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.3, self.training)


@feature("Random numbers", "`functional.dropout` in a module of one's own", declares=("random numbers",))
class DropoutByFunction(ZooTask):
    def build_model(self) -> nn.Module:
        return with_layer(FunctionalDropout())


@feature("Random numbers", "noise in the loss", declares=("random numbers",))
class NoiseInLoss(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return mse(model(x + 0.1 * torch.randn_like(x) * model.training), y)


@feature("Random numbers", "NumPy's and Python's generators in the loss", declares=("random numbers",))
class NumpyInLoss(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        factor = 1 + 0.1 * (np.random.rand() + random.random()) * model.training
        return mse(model(x * factor), y)


@feature("Random numbers", "mixup in the loss", declares=("random numbers", "mean over samples"))
class Mixup(ZooTask):
    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        if not model.training:
            return mse(model(x), y)
        part, order = torch.rand((), dtype=x.dtype), torch.randperm(len(x))
        return mse(model(x * part + x[order] * (1 - part)), y * part + y[order] * (1 - part))


@feature("Random numbers", "random numbers in `collate`", declares=("collate",))
class RandomCollate(ZooTask):
    def collate(self, samples: Any) -> Any:
        x, y = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
        return x + 0.1 * torch.randn_like(x), y


@feature("Random numbers", "random numbers in `collate`, with loader processes", declares=("collate",), num_workers=2)
class RandomCollateWorkers(RandomCollate):  # type: ignore[valid-type,misc]
    pass


class Augmenting(Samples):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn_like(x) + 0.1 * random.random() + 0.1 * float(np.random.rand()), y


@feature("Random numbers", "random augmentation of samples")
class Augmentation(ZooTask):
    def train_data(self) -> Any:
        return Augmenting(*data())


@feature("Random numbers", "random numbers in the evaluation alone", eval_every_epochs=1.0)
class RandomEvaluation(ZooTask):
    def metrics(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        noisy = model(x + 0.1 * torch.randn_like(x))
        return {"noisy": dure.Sum((noisy - y).square().mean(1).sum(), len(x))}


class OwnDraws(nn.Module):
    """Scales by a number that its own generator draws."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 0.2 * self.generator.random()) if self.training else x


@feature("Random numbers", "random numbers of a layer's own generator", declares=("random numbers",))
class LayersGenerator(ZooTask):
    def build_model(self) -> nn.Module:
        return with_layer(OwnDraws())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(HIDDEN, 2, dropout=0.3, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, None, :] * torch.linspace(0.5, 1.5, 3, dtype=x.dtype, device=x.device)[:, None]
        return self.inner(rows, rows, rows, need_weights=False)[0].mean(1)


@feature("Random numbers", "dropout inside `nn.MultiheadAttention`", declares=("random numbers",))
class AttentionDropout(ZooTask):
    def build_model(self) -> nn.Module:
        return with_layer(Attention())


class Recurrent(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.inner = nn.LSTM(HIDDEN, HIDDEN, num_layers=2, dropout=dropout, batch_first=True).double()

    def forward(self, x: Tensor) -> Tensor:
        rows = x[:, None, :] * torch.linspace(0.5, 1.5, 3, dtype=x.dtype, device=x.device)[:, None]
        return self.inner(rows)[0][:, -1]


@feature("Random numbers", "dropout inside `nn.LSTM`", declares=("random numbers",))
class LstmDropout(ZooTask):
    def build_model(self) -> nn.Module:
        return with_layer(Recurrent(0.3))
