"""DataParallel on virtual devices: what is divided, gathered and refused."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from dure.errors import TaskInvalid
from dure.strategies.device_threads import DeviceThreads
from tests.strategies.contract.test_base import ROWS, prepared, step


class Answers(nn.Module):
    """Gives its output in a chosen form."""

    def __init__(self, form):
        super().__init__()
        self.linear = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        self.linear.weight.data = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
        self.form = form

    def forward(self, x, *, scale=1.0):
        return self.form(self.linear(x) * scale)


FORMS = {
    "tensor": (lambda y: y, lambda out: out),
    "tuple": (lambda y: (y, y.detach()), lambda out: out[0]),
    "dict": (lambda y: {"logits": y, "other": [y]}, lambda out: out["logits"]),
    "nested": (lambda y: [{"a": (y,)}], lambda out: out[0]["a"][0]),
}


@pytest.mark.parametrize("form", FORMS)
def test_dp_gathers_outputs_of_any_form_and_steps_as_one_device(form):
    write, read = FORMS[form]
    strategy = prepared(lambda model, x: read(model(x, scale=3.0)).mean(), model=Answers(write), name="dp", devices=2)
    loss_sum, count, _ = step(strategy, ROWS)
    strategy.close()
    assert (loss_sum, count) == (3 * 21.0, 3)
    torch.testing.assert_close(strategy.model.linear.weight, torch.tensor([[1.0, 2.0]]).double() - 3 * ROWS.mean(0))


def test_dp_computes_the_loss_once_over_the_whole_batch():
    """A loss that no sum over devices could give: the largest output of the batch."""
    strategy = prepared(lambda model, x: model(x).max(), model=Answers(lambda y: y), name="dp", devices=3)
    step(strategy, ROWS)
    strategy.close()
    torch.testing.assert_close(strategy.model.linear.weight, torch.tensor([[1.0, 2.0]]).double() - ROWS[0])


def test_dp_of_a_model_that_returns_a_scalar_is_refused():
    strategy = prepared(lambda model, x: model(x), model=Answers(lambda y: y.mean()), name="dp", devices=2)
    with pytest.raises(TaskInvalid, match="the model returned a scalar on each device"):
        step(strategy, ROWS)
    strategy.close()


def test_dp_uses_as_many_devices_as_there_are_samples(monkeypatch):
    used = []
    run = DeviceThreads.run
    monkeypatch.setattr(DeviceThreads, "run", lambda threads, calls: used.append(len(calls)) or run(threads, calls))
    strategy = prepared(lambda model, x: model(x).mean(), name="dp", devices=3)
    for size in (1, 2, 3):
        step(strategy, ROWS[:size])
    strategy.close()
    assert used == [2, 3]  # a single sample goes to the model itself


def test_dp_shows_the_task_the_attributes_of_its_model():
    class Task(SimpleNamespace):
        def loss(self, model, x):
            assert model.form is not None
            return functional.mse_loss(model(x), torch.zeros(len(x), 1).double()) + model.linear.weight.square().sum()

    strategy = prepared(Task().loss, model=Answers(lambda y: y), name="dp", devices=2)
    alone = prepared(Task().loss, model=Answers(lambda y: y))
    step(strategy, ROWS)
    step(alone, ROWS)
    strategy.close()
    torch.testing.assert_close(strategy.model.linear.weight, alone.model.linear.weight)


def test_dp_raises_the_models_own_error():
    def fail(y):
        raise KeyError("no such head")

    strategy = prepared(lambda model, x: model(x), model=Answers(fail), name="dp", devices=2)
    with pytest.raises(KeyError, match="no such head"):
        step(strategy, ROWS)
    strategy.close()


def test_dp_microbatches_hold_each_devices_share():
    strategy = prepared(lambda model, x: model(x).mean(), name="dp", devices=3)
    assert strategy.parts.process_size(4) == 12
    strategy.close()


@pytest.mark.parametrize(("name", "devices", "microsteps"), [("dp", 3, 4), ("dp", 1, 4), ("balanced_dp", 3, 4)])
def test_sent_bytes_are_the_tables_formula(name, devices, microsteps):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1).requires_grad_(False)).double()
    strategy = prepared(lambda model, x: model(x).mean(), model=model, name=name, devices=devices)
    w = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    g = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    times = microsteps if name == "dp" else 1
    assert strategy.sent_bytes(microsteps) == times * (devices - 1) * (w + g)
    strategy.close()
