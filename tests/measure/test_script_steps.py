"""Scripts of odd structure under `dure run --record`: they run as without it, and have the steps that they take."""

import json
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dure
from dure.measure.collective_calls import Calls
from dure.measure.operations import BackwardOperations
from dure.measure.script_steps import _num_samples
from tests.commands import Prewarmed

BEGIN = """
import pickle, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Linear(4, 1)
sgd = torch.optim.SGD(model.parameters(), 0.1)
def batches(num=12):
    return (x for (x,) in DataLoader(TensorDataset(torch.randn(8 * num, 4)), batch_size=8))
def loss(x):
    return model(x).square().mean()
def profiled(**settings):
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **settings)
"""
SCRIPTS = {
    "a profiler around forward and backward": (
        "for x in batches():\n  with profiled(): loss(x).backward()\n  sgd.step()",
        12,
    ),
    "a profiler that begins and ends between fetches": (
        "with profiled(schedule=torch.profiler.schedule(wait=4, warmup=1, active=2)) as seen:\n"
        "  for x in batches():\n    seen.step(); loss(x).backward(); sgd.step()",
        12,
    ),
    "inference with gradients after a few steps": (
        "for x in batches(4): loss(x).backward(); sgd.step()\nfor x in batches(): model(x)\nwith profiled(): model(x)",
        4,
    ),
    "derivatives instead of a backward": (
        "for x in batches():\n  found = torch.autograd.grad(loss(x), [*model.parameters()])\n"
        "  for p, g in zip(model.parameters(), found): p.grad = g\n  sgd.step()",
        12,
    ),
    "a penalty on gradients": (
        "for x in batches():\n  x.requires_grad_()\n"
        "  (slope,) = torch.autograd.grad(loss(x), x, create_graph=True)\n"
        "  (loss(x) + slope.square().sum()).backward(); sgd.step()",
        12,
    ),
    "gradients by hand": ("for x in batches():\n  model.weight.grad = torch.ones_like(model.weight)\n  sgd.step()", 12),
    "steps without an optimiser": (
        "for x in batches(500):\n  loss(x).backward()\n  with torch.no_grad():\n"
        "    for p in model.parameters(): p -= 0.1 * p.grad; p.grad = None",
        0,
    ),
    "two optimisers": (
        "other = torch.optim.Adam([model.bias])\nfor x in batches(): loss(x).backward(); sgd.step(); other.step()",
        12,
    ),
    "one optimiser twice": ("for x in batches(): loss(x).backward(); sgd.step(); sgd.step()", 24),
    "a closure": (
        "lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=2)\nfor x in batches():\n  def closure():\n"
        "    lbfgs.zero_grad(); found = loss(x); found.backward(); return found\n  lbfgs.step(closure)",
        12,
    ),
    "functions that are pickled": (
        "assert pickle.loads(pickle.dumps(torch.save)) is torch.save\npickle.dumps(torch.autograd.backward)\n"
        "for x in batches(): loss(x).backward(); sgd.step()",
        12,
    ),
    "an optimiser that is compiled": (
        "step = torch.compile(sgd.step, backend='eager')\nfor x in batches(): loss(x).backward(); step()",
        12,
    ),
    "derivatives that are compiled": (
        "@torch.compile(backend='eager')\ndef slope(x): return torch.autograd.grad(x.square().sum(), x)[0]\n"
        "for x in batches(): slope(x.requires_grad_()); loss(x).backward(); sgd.step()",
        12,
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_of_odd_structure_when_recorded_then_it_runs_and_has_its_steps(
    name: str, prewarmed: Prewarmed, tmp_path: Path
) -> None:
    body, num_steps = SCRIPTS[name]
    script = tmp_path / "script.py"
    script.write_text(f"{BEGIN}{body}\n")
    words = ["run", "--nproc", "1", "--threads", "1", "--record", "--runs-dir", tmp_path, "--name", "seen", script]
    done = prewarmed.run(tmp_path, *words)
    assert done.code == 0, done.err
    assert "no longer recorded" not in done.err
    steps = [json.loads(line) for line in (tmp_path / "seen/rank0.jsonl").read_text().splitlines()]
    assert len(steps) == num_steps


def test_fetches_without_a_backward_then_their_time_is_that_of_their_number(
    prewarmed: Prewarmed, tmp_path: Path
) -> None:
    # 20,000 of them took 37 s when each looked at all spans before it
    script = tmp_path / "script.py"
    script.write_text(f"{BEGIN}for x in batches(20_000): pass\n")
    words = ["run", "--nproc", "1", "--threads", "1", "--record", "--runs-dir", tmp_path, "--name", "seen", script]
    assert prewarmed.run(tmp_path, *words).code == 0


class Lazy(dict[str, Any]):
    """Batch whose items are computed when they are asked for."""

    def __getitem__(self, name: str) -> Any:
        raise AssertionError("an item was asked for")


@pytest.mark.parametrize(
    ("batch", "num"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(4), torch.zeros(5)], 4),
        ({"a": {"b": (torch.zeros(2),)}}, 2),
        (UserDict({"a": torch.zeros(6)}), 6),
        (Lazy(a=torch.zeros(7)), 7),
        (torch.tensor(1.0), 0),
        ("text", 0),
        (None, 0),
    ],
)
def test_samples_of_a_batch_then_none_of_its_code_is_called(batch: object, num: int) -> None:
    assert _num_samples(batch) == num


def test_operations_then_those_of_one_backward_are_told_once() -> None:
    told: list[tuple[int, float]] = []
    operations = BackwardOperations(lambda *found: told.append(found))
    weight = torch.ones(3, requires_grad=True)
    for _ in range(8):
        loss = (weight * 2).sum()
        operations.begin()
        loss.backward()
        operations.end()
    ((count, least),) = told
    assert 2 <= count <= 10
    assert 0 < least < 1e-2
    assert operations.is_over


def test_bytes_of_calls_then_they_are_those_of_rings_of_their_groups() -> None:
    calls = Calls(
        times=[1.0, 2.0, 3.0, 4.0, 5.0],
        ops=["all_reduce", "_all_gather_base", "_reduce_scatter_base", "broadcast", "all_reduce"],
        input_bytes=[100, 100, 100, 100, 10**9],
        group_sizes=[2, 4, 4, 2, 2],
    )
    assert calls.sent_bytes(0.5, 4.5) == 100 + 300 + 75 + 100


class Profiled(dure.Task):
    """Profiles its own forward in every call."""

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.ones(80, 4))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            found: torch.Tensor = model(batch[0]).square().mean()
        return found


def test_task_when_it_profiles_its_own_calls_then_it_may(tmp_path: Path) -> None:
    run = dure.train(Profiled(), runs_dir=tmp_path, quiet=True, global_batch_size=8, max_restarts=0)
    assert (run.status, run.steps) == ("completed", 10)
    assert "operations" in (Path(run.run) / "events.jsonl").read_text()
