"""A run on one device is the loop by hand, whatever the loss keeps where: trials before it leave nothing behind."""

import functools
import io
import json
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.utils.data import Dataset, default_collate

from tests.conformance.cases import largest_difference, train_case, weights_of
from tests.conformance.zoo.feature import NUM_SAMPLES, ZooTask, chain, data

STEPS = 6


@functools.cache
def factor_of(key):
    return [1.0]


@functools.lru_cache(maxsize=4)
def bounded_factor_of(key):
    return [1.0]


def helper():
    pass


class ScaledTanh(nn.Module):
    def forward(self, x):
        return torch.tanh(x)


class Trained(ZooTask):
    """The plain task from given weights."""

    def build_model(self):
        torch.manual_seed(0)
        return chain()


class CachedInFunction(Trained):
    def loss(self, model, batch):
        factor_of("all")[0] *= 1.1
        return super().loss(model, batch) * factor_of("all")[0]


class CachedInBoundedFunction(Trained):
    def loss(self, model, batch):
        bounded_factor_of("all")[0] *= 1.1
        return super().loss(model, batch) * bounded_factor_of("all")[0]


class CachedBefore(Trained):
    """A list in a cache that is filled before the loss is first called."""

    cached = staticmethod(factor_of)

    def build_model(self):
        self.cached("all")
        return super().build_model()

    def loss(self, model, batch):
        self.cached("all")[0] *= 1.1
        return super().loss(model, batch) * self.cached("all")[0]


class CachedBeforeInBounded(CachedBefore):
    cached = staticmethod(bounded_factor_of)


class CachedInMethod(Trained):
    @functools.cache  # noqa: B019
    def kept(self):
        return [1.0]

    def loss(self, model, batch):
        self.kept()[0] *= 1.1
        return super().loss(model, batch) * self.kept()[0]


class AttributeOfParameter(Trained):
    def loss(self, model, batch):
        weight = next(model.parameters())
        weight.calls = getattr(weight, "calls", 0) + 1
        return super().loss(model, batch) * (1 + 0.1 * weight.calls)


class AttributeOfFunction(Trained):
    def loss(self, model, batch):
        helper.calls = getattr(helper, "calls", 0) + 1
        return super().loss(model, batch) * (1 + 0.1 * helper.calls)


class EnvironmentVariable(Trained):
    def loss(self, model, batch):
        os.environ["ZOO_CALLS"] = str(int(os.environ.get("ZOO_CALLS", 0)) + 1)
        return super().loss(model, batch) * (1 + 0.1 * int(os.environ["ZOO_CALLS"]))


class HookOfOptimizer(Trained):
    """A hook that is not to be registered twice, by an optimiser without which the loss fails."""

    def build_optimizer(self, model):
        self.factor = 1.5
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: 0.9 * gradient)
        model[2].register_forward_hook(lambda module, args, output: 1.1 * output)
        return super().build_optimizer(model)

    def loss(self, model, batch):
        return super().loss(model, batch) * self.factor


def scale_gradient(parameter):
    parameter.grad.mul_(0.9)


class HookOfFirstLoss(Trained):
    def build_model(self):
        self.has_hooks = False
        return super().build_model()

    def loss(self, model, batch):
        if not self.has_hooks:
            self.has_hooks = True
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(scale_gradient)
        return super().loss(model, batch)


class ReplacedForward(Trained):
    def build_optimizer(self, model):
        forward = model[2].forward
        model[2].forward = lambda x: 1.1 * forward(x)
        return super().build_optimizer(model)


class ReplacedMethodOfClass(Trained):
    def build_optimizer(self, model):
        forward = ScaledTanh.forward
        ScaledTanh.forward = lambda self, x: 1.1 * forward(self, x)
        return super().build_optimizer(model)

    def build_model(self):
        model = super().build_model()
        model[3] = ScaledTanh()
        return model


class GlobalHook(Trained):
    def build_optimizer(self, model):
        nn.modules.module.register_module_forward_hook(
            lambda module, args, output: 1.1 * output if isinstance(module, nn.Tanh) else None
        )
        return super().build_optimizer(model)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class ParametrizedByOptimizer(Trained):
    def build_optimizer(self, model):
        nn.utils.parametrize.register_parametrization(model[2], "weight", Doubled())
        return super().build_optimizer(model)


class PrunedByOptimizer(Trained):
    def build_optimizer(self, model):
        nn.utils.prune.l1_unstructured(model[2], "weight", amount=0.3)
        return super().build_optimizer(model)


class FileInMemory(Trained):
    def build_model(self):
        self.file = io.BytesIO(b"1.0")
        return super().build_model()

    def loss(self, model, batch):
        factor = float(self.file.getvalue()) * 1.1
        self.file.seek(0)
        self.file.write(str(factor).encode())
        return super().loss(model, batch) * factor


class Event(Trained):
    def build_model(self):
        self.has_begun = threading.Event()
        return super().build_model()

    def loss(self, model, batch):
        factor = 1.0 if self.has_begun.is_set() else 3.0
        self.has_begun.set()
        return super().loss(model, batch) * factor


class AppendedFile(Trained):
    def loss(self, model, batch):
        with open("calls.txt", "a") as file:
            file.write("call\n")
        return super().loss(model, batch) * (1 + 0.1 * len(Path("calls.txt").read_text().split()))


class WrittenFile(Trained):
    def loss(self, model, batch):
        path = Path("factor.txt")
        factor = (float(path.read_text()) if path.exists() else 1.0) * 1.1
        path.write_text(str(factor))
        return super().loss(model, batch) * factor


class SavedTensor(Trained):
    def loss(self, model, batch):
        factor = (torch.load("factor.pt") if Path("factor.pt").exists() else torch.ones(())) * 1.1
        with open("factor.pt", "wb") as file:
            torch.save(factor, file)
        return super().loss(model, batch) * factor


class Labels(Dataset):
    """Samples whose targets are in a list."""

    def __init__(self, x, y):
        self.x, self.y = x, [*y]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return index, self.x[index], self.y[index]


class SmoothsLabels(Trained):
    def train_data(self):
        self.rows = Labels(*data())
        return self.rows

    def eval_data(self):
        return None

    def loss(self, model, batch):
        index, x, _ = batch
        y = torch.stack([self.rows.y[number] for number in index])
        output = model(x)
        for number, found in zip(index.tolist(), output.detach(), strict=True):
            self.rows.y[number] = 0.9 * self.rows.y[number] + 0.1 * found
        return nn.functional.mse_loss(output, y)


SCALED_TANH = ScaledTanh.forward
TASKS = [
    *(CachedInFunction, CachedInBoundedFunction, CachedInMethod, AttributeOfParameter, AttributeOfFunction),
    *(CachedBefore, CachedBeforeInBounded, HookOfOptimizer, HookOfFirstLoss),
    *(ReplacedForward, ReplacedMethodOfClass, GlobalHook, ParametrizedByOptimizer, PrunedByOptimizer),
    *(FileInMemory, Event, SmoothsLabels),
    *(EnvironmentVariable, AppendedFile, WrittenFile, SavedTensor),
]


@pytest.fixture(autouse=True)
def _forgets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    forget()
    yield
    forget()


def forget():
    for cached in (factor_of, bounded_factor_of, CachedInMethod.kept):
        cached.cache_clear()
    vars(helper).clear()
    ScaledTanh.forward = SCALED_TANH
    nn.modules.module._global_forward_hooks.clear()
    os.environ.pop("ZOO_CALLS", None)
    for path in Path().glob("*.[tp]*t"):
        path.unlink()


def by_hand(task):
    model, rows = task.build_model(), task.train_data()
    batch = default_collate([rows[number] for number in range(NUM_SAMPLES)])
    optimizer = task.build_optimizer(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("cls", TASKS, ids=lambda cls: cls.__name__)
def test_run_of_whole_batches_is_the_loop_by_hand(cls, tmp_path):
    expected = by_hand(cls())
    forget()
    run = train_case(tmp_path, cls, global_batch_size=NUM_SAMPLES, samples=NUM_SAMPLES * STEPS, seed=3)
    assert largest_difference(weights_of(run), expected) < 1e-10


@functools.cache
def mask_of(size):
    return torch.ones(size)


class PureCache(Trained):
    """A mask by the size of the batch, as attention has it."""

    def loss(self, model, batch):
        return super().loss(model, batch) * mask_of(len(batch[0])).mean()


@pytest.mark.parametrize(
    ("cls", "named"),
    [
        (CachedInFunction, "global factor_of"),
        (CachedInMethod, "CachedInMethod.kept"),
        (EnvironmentVariable, "os.environ['ZOO_CALLS']"),
        (AppendedFile, "file calls.txt"),
        (PureCache, None),
        (AttributeOfParameter, None),
    ],
)
def test_state_that_no_checkpoint_has_is_declared(cls, named, tmp_path):
    run = train_case(tmp_path, cls, global_batch_size=NUM_SAMPLES, samples=NUM_SAMPLES, seed=3)
    declared = json.loads((run / "summary.json").read_text())["not_preserved"]
    assert [named in text for text in declared] == [True] * (named is not None)
