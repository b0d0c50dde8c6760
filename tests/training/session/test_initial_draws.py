"""Initial draws: a model that is built again has the same values, and the generator is where it was."""

import base64
import copy
import json
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import dlpack

import dure
from dure.data import TensorData
from dure.training.session import initial_draws
from dure.training.session.initial_draws import InitialDraws

SIDE = 256


class OfItsOwn(nn.Module):
    """Layer that reads its weight while it is built."""

    def __init__(self, read):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(SIDE, SIDE))
        nn.init.normal_(self.weight, std=0.02)
        self.seen = read(self.weight.detach())
        self.later = torch.rand(4)


def in_place(weight):
    weight.mul_(2).clamp_(-0.01, 0.01)
    return weight.clone()


def drawn_again(weight):
    weight.uniform_(-1, 1)
    nn.init.trunc_normal_(weight)
    return weight.clone()


def over_numpy(weight):
    array = weight.numpy()
    weight.normal_()  # read through the array, which no call shows
    return torch.from_numpy(array.copy())


def from_numpy(weight):
    array = np.zeros((SIDE, SIDE), dtype=np.float32)
    torch.from_numpy(array).normal_()
    return torch.from_numpy(array.copy())


def own_generator(weight):
    return torch.empty(SIDE, SIDE).normal_(generator=torch.Generator().manual_seed(3))


def averaged(weight):
    return nn.ModuleList([copy.deepcopy(nn.Linear(SIDE, SIDE)), nn.Linear(SIDE, SIDE)]).state_dict()


def compiled(weight):
    layer = nn.Linear(SIDE, SIDE)
    return torch.compile(layer, backend="eager")(weight)


READS = [
    torch.Tensor.clone, torch.Tensor.tolist, in_place, drawn_again, over_numpy, from_numpy, own_generator, averaged,
    compiled, lambda weight: weight[3:5].t() @ weight[:2], lambda weight: float(weight.std()),
    lambda weight: torch.stack([weight, weight]).sum(), lambda weight: dlpack.from_dlpack(weight).clone(),
    lambda weight: torch.randn(SIDE, SIDE), lambda weight: nn.init.orthogonal_(torch.empty(SIDE, SIDE)),
    lambda weight: torch.empty(SIDE, SIDE, dtype=torch.float64).normal_(),
    lambda weight: torch.empty(SIDE, SIDE).t().normal_().clone(),
    lambda weight: torch.empty(2 * SIDE, SIDE)[::2].normal_().clone(),
    lambda weight: nn.MultiheadAttention(SIDE, 2).state_dict(), lambda weight: nn.LSTM(SIDE, SIDE).state_dict(),
    lambda weight: nn.utils.parametrizations.weight_norm(nn.Linear(SIDE, SIDE)).state_dict(),
    lambda weight: nn.utils.parametrizations.spectral_norm(nn.Linear(SIDE, SIDE)).state_dict(),
    lambda weight: torch.jit.script(nn.Linear(SIDE, SIDE)).state_dict(),
]  # fmt: skip


def vectorized(weight):
    return torch.vmap(lambda row: torch.empty_like(row).normal_(), randomness="different")(weight.expand(2, SIDE, SIDE))


READS.append(vectorized)


def built(draws, read):
    torch.manual_seed(1)
    with draws.of_build():
        layers = [OfItsOwn(read), nn.Linear(SIDE, SIDE), nn.Embedding(SIDE, SIDE), nn.Conv2d(SIDE, SIDE, 3)]
    return nn.ModuleList(layers), torch.default_generator.get_state()


@pytest.fixture
def slow_threads(monkeypatch):
    """Let each draw of a thread wait a little, so that what reads it too early shows."""
    draw = initial_draws._draw_apart
    drawn = []

    def wait(*args):
        time.sleep(0.02)
        drawn.append(draw(*args))

    monkeypatch.setattr(initial_draws, "_draw_apart", wait)
    return drawn


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@pytest.mark.parametrize("read", READS, ids=range(len(READS)))
def test_model_built_again_is_the_same_whatever_its_build_reads(read, slow_threads):
    torch.manual_seed(1)
    plain = [OfItsOwn(read), nn.Linear(SIDE, SIDE), nn.Embedding(SIDE, SIDE), nn.Conv2d(SIDE, SIDE, 3)]
    state = torch.default_generator.get_state()
    draws = InitialDraws()
    for _ in range(2):
        model, end = built(draws, read)
        torch.testing.assert_close(
            [*model.parameters()], [p for each in plain for p in each.parameters()], rtol=0, atol=0
        )
        torch.testing.assert_close(model[0].seen, plain[0].seen, rtol=0, atol=0)
        assert torch.equal(model[0].later, plain[0].later)
        assert torch.equal(end, state)
        draws = InitialDraws.from_json(json.loads(json.dumps(draws.to_json())))
    assert slow_threads


class Wide(dure.Task):
    """Model whose first sum of weights is kept nowhere else."""

    def build_model(self):
        model = nn.Linear(SIDE, SIDE)
        model.first_sum = float(model.weight.detach().sum())
        return model

    def train_data(self):
        return TensorData(torch.ones(4, SIDE))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        return (model(batch[0]) * model.first_sum).square().mean()


def test_resumed_run_draws_in_threads_and_continues_as_one_that_was_not_stopped(tmp_path, slow_threads, monkeypatch):
    settings = {"global_batch_size": 2, "start": "inline", "threads": 1, "quiet": True}
    dure.train(Wide(), runs_dir=tmp_path, name="whole", samples=8, **settings)
    assert not (tmp_path / "whole/initial_draws.json").exists()
    monkeypatch.setattr(initial_draws, "_WORTHWHILE_ITEMS", SIDE**2)
    dure.train(Wide(), runs_dir=tmp_path, name="run", samples=4, **settings)
    assert not slow_threads
    dure.train(Wide(), resume=tmp_path / "run", samples=8, start="inline", quiet=True)
    assert slow_threads
    for name in ("whole", "run"):
        dure.export(tmp_path / name, tmp_path / f"{name}.safetensors")
    assert (tmp_path / "whole.safetensors").read_bytes() == (tmp_path / "run.safetensors").read_bytes()


def test_draws_of_another_seed_or_distribution_are_not_known(slow_threads):
    draws = InitialDraws()
    built(draws, torch.Tensor.clone)
    torch.manual_seed(2)
    with draws.of_build():
        one = nn.Linear(SIDE, SIDE)
    torch.manual_seed(1)
    with draws.of_build():
        other = torch.empty(SIDE, SIDE).normal_(std=0.03)
    assert not slow_threads
    torch.manual_seed(2)
    assert torch.equal(one.weight, nn.Linear(SIDE, SIDE).weight)
    torch.manual_seed(1)
    assert torch.equal(other, torch.empty(SIDE, SIDE).normal_(std=0.03))


def test_draws_refused_by_torch_are_refused():
    draws = InitialDraws()
    for _ in range(2):
        torch.manual_seed(0)
        with draws.of_build(), pytest.raises(RuntimeError, match="leaf"):
            nn.Parameter(torch.zeros(SIDE, SIDE)).normal_()


def test_error_of_a_draw_in_a_thread_is_raised(monkeypatch):
    def fail(*args):
        raise MemoryError("no room")

    draws = InitialDraws()
    built(draws, torch.Tensor.clone)
    monkeypatch.setattr(initial_draws, "_draw_apart", fail)
    with pytest.raises(MemoryError, match="no room"):
        built(draws, torch.Tensor.clone)


def of_another_size(states):
    short = {key: base64.b64encode(b"short").decode() for key in states}
    return {"states": short, "digest": initial_draws._digest(dict.fromkeys(states, b"short"))}


@pytest.mark.parametrize("damage", [None, [], {"states": {}}, {"states": {"a": "!"}, "digest": ""}, "other", "short"])
def test_damaged_record_is_not_used(damage, slow_threads):
    draws = InitialDraws()
    built(draws, torch.Tensor.clone)
    record = draws.to_json()
    if damage == "other":
        key = next(iter(record["states"]))
        record["states"][key] = record["states"][key].replace("A", "B", 1)
    elif damage == "short":
        record = of_another_size(record["states"])
    else:
        record = damage
    expected, state = built(InitialDraws(), torch.Tensor.clone)
    model, end = built(InitialDraws.from_json(record), torch.Tensor.clone)
    assert not slow_threads
    assert torch.equal(end, state)
    torch.testing.assert_close([*model.parameters()], [*expected.parameters()], rtol=0, atol=0)
