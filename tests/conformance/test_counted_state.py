"""State that moves alike on all samples that were tried, and on others does not: ranks and devices notice."""

import ctypes
import json
import struct
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dure
from dure.training.objects.counted_state import differing
from tests.conformance.cases import largest_difference, train_case, weights_of

STEPS = {"global_batch_size": 8, "epochs": 2, "seed": 3, "eval_every_epochs": 1.0}


class Controlled(dure.Task):
    """A loss with a coefficient that is raised or lowered by what the last batch gave, as an adaptive KL penalty's."""

    kind: str = "attribute"

    def build_model(self):
        self.beta, self.calls, self.is_hard = 1.0, 0, False
        self.level = LEVELS[self.kind](1.0) if self.kind in LEVELS else None
        torch.manual_seed(1)
        return Net(in_buffer=self.kind == "buffer").double()

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_data(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(48, 4, generator=generator, dtype=torch.float64)
        # the first samples, on which a loss is tried, all move the coefficient the same way
        x[:36] *= 0.05
        return torch.utils.data.TensorDataset(x, (x[:, 0] > 0).double())

    def loss(self, model, batch):
        x, y = batch
        out, coefficient = model(x)
        loss = F.binary_cross_entropy_with_logits(out, y)
        if self.kind == "counter":
            self.calls += 1
            return loss * 0.99**self.calls
        if self.kind == "flag":
            used, self.is_hard = self.is_hard, self.is_hard ^ (x[:, 0].mean().item() > 0.3)
            return loss * (2.0 if used else 1.0)
        if self.kind == "tuple":
            self.beta = (moved(self.beta[0] if isinstance(self.beta, tuple) else 1.0, x), 0)
            return loss + self.beta[0] * out.pow(2).mean()
        if self.kind == "attribute":
            self.beta = moved(self.beta, x)
            coefficient = self.beta
        if self.kind in LEVELS:
            coefficient = moved(read_level(self.level), x)
            write_level(self.level, coefficient)
        return loss + coefficient * out.pow(2).mean()


LEVELS = {
    "array": lambda value: array("d", [value]),
    "ctypes": lambda value: (ctypes.c_double * 1)(value),
    "bytearray": lambda value: bytearray(struct.pack("d", value)),
    "parameter": lambda value: nn.Parameter(torch.full((1,), value, dtype=torch.float64), requires_grad=False),
}
"""A number in memory of its own, by the kind of that memory."""


def read_level(level):
    return struct.unpack("d", level)[0] if isinstance(level, bytearray) else float(level[0])


def write_level(level, value):
    if isinstance(level, bytearray):
        level[:] = struct.pack("d", value)
    else:
        level[0] = value


def moved(beta, x):
    return beta * 1.1 if x.detach().pow(2).mean().item() > 0.8 else beta / 1.1


class Net(nn.Module):
    def __init__(self, in_buffer):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("beta", torch.ones(()) if in_buffer else None)

    def forward(self, x):
        if self.beta is None:
            return self.linear(x)[:, 0], 0.0
        beta = self.beta.clone()
        if self.training:
            self.beta.copy_(moved(self.beta.item(), x))
        return self.linear(x)[:, 0], beta


def declared(run):
    return json.loads((run / "summary.json").read_text())["not_preserved"]


@pytest.mark.parametrize(
    ("kind", "strategy", "what"),
    [
        ("attribute", "ddp", "state that the loss keeps (task.beta"),
        ("flag", "ddp", "(task.is_hard"),
        ("tuple", "zero1", "state that the loss keeps (task.beta"),
        ("buffer", "ddp", "buffers learned in forward (beta)"),
        ("buffer", "fsdp", "buffers learned in forward (beta)"),
        ("buffer", "dp", "buffers learned in forward (beta)"),
        *((kind, "ddp", "(task.level") for kind in LEVELS),
    ],
)
def test_run_when_ranks_move_a_coefficient_differently_then_that_is_declared(kind, strategy, what, trained, tmp_path):
    one = weights_of(trained(Controlled(kind=kind), **STEPS))
    run = train_case(tmp_path, Controlled(kind=kind), strategy, 2, **STEPS)
    assert largest_difference(weights_of(run), one) > 1e-9
    assert [text for text in declared(run) if what in text], declared(run)


def test_run_when_state_counts_calls_then_nothing_is_declared(trained, tmp_path):
    one = weights_of(trained(Controlled(kind="counter"), **STEPS))
    run = train_case(tmp_path, Controlled(kind="counter"), "ddp", 2, **STEPS)
    assert largest_difference(weights_of(run), one) < 1e-12
    assert declared(run) == []


class Flagged(Controlled):
    """A flag that hardly any batch sets, kept in several ways."""

    def build_model(self):
        self.flags = {"is_hard": False}
        self.held = SimpleNamespace(is_hard=np.bool_(False))
        return super().build_model()

    def loss(self, model, batch):
        out, _ = model(batch[0])
        loss = F.binary_cross_entropy_with_logits(out, batch[1])
        was_hard, is_hard = self.flags["is_hard"], bool(batch[0][:, 0].mean() > 0.1)
        model.is_hard = self.flags["is_hard"] = is_hard
        self.held.is_hard = np.bool_(is_hard)
        if is_hard:
            self.found = True
        elif hasattr(self, "found"):
            del self.found
        return loss * (2.0 if was_hard else 1.0)


def test_flags_that_are_set_back_are_declared_wherever_they_are_kept(tmp_path):
    texts = " ".join(declared(train_case(tmp_path, Flagged(), "ddp", 2, **STEPS)))
    assert [
        path for path in ("task.flags", "task.held.is_hard", "task.found", "model.is_hard") if path not in texts
    ] == []


class FilledLater(Controlled):
    """A task that keeps outputs in an attribute that is None at first, and NaN in another."""

    def build_model(self):
        self.outputs, self.worst = None, 0.0
        return super().build_model()

    def loss(self, model, batch):
        self.outputs, self.worst = model(batch[0])[0].detach(), float("nan")
        return super().loss(model, batch)


def test_attribute_that_becomes_a_tensor_is_no_single_value(tmp_path):
    train_case(tmp_path, FilledLater(kind="counter"), "ddp", 2, **STEPS)


class Rebinding(Controlled):
    """A model that puts another tensor in the place of its counter in every call."""

    def build_model(self):
        class Counting(nn.Linear):
            def forward(self, x):
                self.count = self.count + 1
                return super().forward(x)[:, 0], self.count * 1e-3

        torch.manual_seed(1)
        self.beta, self.calls = 1.0, 0
        model = Counting(4, 1, dtype=torch.float64)
        model.register_buffer("count", torch.zeros((), dtype=torch.float64))
        return model


@pytest.mark.parametrize("strategy", ["dp", "ddp"])
def test_buffer_that_is_replaced_in_every_call_is_read_where_it_is(strategy, trained, tmp_path):
    settings = {**STEPS, "eval_every_epochs": 1e6}
    one = weights_of(trained(Rebinding(kind="buffer"), **settings))
    run = train_case(tmp_path, Rebinding(kind="buffer"), strategy, 2, **settings)
    assert largest_difference(weights_of(run), one) < 1e-12
    assert declared(run) == []


def test_paths_differ_if_any_two_ranks_that_have_them_differ():
    assert differing([{"a": "1", "b": "1"}, {"a": "1", "b": "2"}, {}]) == ["b"]
    assert differing([{"a": "1"}, {"a": "1", "b": "2"}]) == ["b"]  # a flag that one rank alone has changed
    assert differing([{"a": "1"}, {"a": ""}]) == []  # an evaluation changed it, which is declared elsewhere
