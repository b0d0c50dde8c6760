"""Tests of real runs with `--trace`: their results, and the trace of all ranks."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.traces import checked_trace, operators_of, steps_of

TASK = """
import torch, dure
from torch.utils.data import TensorDataset

class Toy(dure.Task):
    def build_model(self):
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def train_data(self):
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
        return TensorDataset(x, x.sum(1, keepdim=True))

    def build_optimizer(self, model): return torch.optim.AdamW(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        x, y = batch
        return dure.Sum(((model(x) - y) ** 2).sum(), len(x))
"""
SCRIPT = """
import sys, torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(96, 4)
own = None
for number, (x, y) in enumerate(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)):
    if number == 5 and "profile" in sys.argv:
        own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        own.start()
    optimizer.zero_grad()
    (model(x) - y).pow(2).mean().backward()
    optimizer.step()
if own is not None:
    own.stop()
    assert any(event.name == "aten::addmm" for event in own.events())
print(torch.cat([each.detach().flatten() for each in model.parameters()]).tolist())
dist.destroy_process_group()
"""  # noqa: E501


def _dure(folder: Path, *words: object) -> "subprocess.CompletedProcess[str]":
    (folder / "toy.py").write_text(TASK)
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "dure", *map(str, words)]
    done = subprocess.run(command, cwd=folder, env={**os.environ}, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_train_when_traced_then_every_rank_is_in_the_trace_and_the_weights_are_the_same(tmp_path):
    flags = ("toy.py:Toy", "--strategy", "ddp", "--nproc", 2, "--epochs", 2, "--global-batch-size", 8)
    traced = _dure(tmp_path, "train", *flags, "--name", "traced", "--trace", 4)
    _dure(tmp_path, "train", *flags, "--name", "plain")
    assert "trace of 4 steps of 2 ranks: runs/traced/trace.json.gz; open it in ui.perfetto.dev" in traced.stderr
    assert "USDT" not in traced.stderr
    digests = set()
    for name in ("traced", "plain"):
        _dure(tmp_path, "export", f"runs/{name}", f"{name}.safetensors", "--which", "last")
        digests.add(hashlib.sha256((tmp_path / f"{name}.safetensors").read_bytes()).hexdigest())
    assert len(digests) == 1
    events = checked_trace(tmp_path / "runs/traced/trace.json.gz")
    for rank in (0, 1):
        steps = steps_of(events, rank)
        assert [step["name"] for step in steps] == ["step 4", "step 5", "step 6", "step 7"]
        operators = operators_of(events, rank)
        for step in steps:
            within = [
                each["name"] for each in operators if step["ts"] <= each["ts"] < step["ts"] + step["dur"]
            ]  # by another clock than the records, and yet on the same one
            assert "aten::addmm" in within
            assert any("AddmmBackward" in name for name in within)
    page = _dure(tmp_path, "report", "runs/traced")
    assert '<a href="trace.json.gz">' in Path(tmp_path / page.stdout.strip()).read_text()


@pytest.mark.slow
def test_script_when_traced_then_it_computes_the_same_and_its_ranks_are_in_the_trace(tmp_path):
    traced = _dure(tmp_path, "run", "--nproc", 2, "--trace", 3, "--name", "traced", "script.py")
    plain = _dure(tmp_path, "run", "--nproc", 2, "--name", "plain", "script.py")
    assert sorted(traced.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    events = checked_trace(tmp_path / "runs/traced/trace.json.gz")
    for rank in (0, 1):
        assert [step["name"] for step in steps_of(events, rank)] == ["step 5", "step 6", "step 7"]
        names = {event["name"] for event in operators_of(events, rank)}
        assert {"aten::addmm", "Optimizer.step#SGD.step", "DistributedDataParallel.forward"} <= names


@pytest.mark.slow
def test_script_when_it_profiles_itself_then_it_does_and_the_trace_has_its_steps(tmp_path):
    done = _dure(tmp_path, "run", "--nproc", 2, "--trace", 3, "--name", "own", "script.py", "profile")
    assert done.stderr.count("torch.profiler was used by the program itself") == 2
    events = checked_trace(tmp_path / "runs/own/trace.json.gz")
    assert steps_of(events, 0)
    assert operators_of(events, 0) == []


@pytest.mark.slow
def test_train_when_a_rank_is_killed_in_the_trace_then_the_rest_is_kept(tmp_path):
    (tmp_path / "faults.toml").write_text('[[fault]]\nkind = "kill"\nrank = 1\nstep = 7\n')
    (tmp_path / "toy.py").write_text(TASK)
    flags = ("--strategy", "ddp", "--nproc", 2, "--epochs", 2, "--global-batch-size", 8, "--max-restarts", 0)
    command = ["-m", "dure", "train", "toy.py:Toy", *flags, "--trace", 100, "--name", "dead", "--faults", "faults.toml"]
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 1
    events = checked_trace(tmp_path / "runs/dead/trace.json.gz")
    assert "aten::addmm" in {event["name"] for event in operators_of(events, 0)}
    assert [step["name"] for step in steps_of(events, 0)] == ["step 4", "step 5", "step 6"]
