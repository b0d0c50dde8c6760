"""Parameter servers: who keeps which rows, what travels, and how far apart workers may be."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import dure
from dure.errors import SpecInvalid
from dure.strategies.contract.abilities import role_of
from dure.strategies.contract.batches import Microbatch
from dure.strategies.contract.context import StrategyContext
from dure.strategies.contract.precision import Precision
from dure.strategies.contract.step_facts import Requests
from dure.strategies.parameter_server.shards import Message, plan_shards
from dure.strategies.table import STRATEGIES, load_strategy
from examples.digits import Digits
from tests.comm.gloo_ranks import on_ranks
from tests.conformance.cases import (
    TO_ROUNDING,
    largest_difference,
    records_of,
    samples_by_epoch,
    train_case,
    weights_of,
)
from tests.conformance.tasks import Regression
from tests.conformance.test_failures import Branching
from tests.conformance.test_resume import SETTINGS, back_to, resumed
from tests.specs import grouped, spec_of

STEPS = {"global_batch_size": 7, "samples": 130, "clip_norm": 0.4, "seed": 5}


# --- who keeps what


def parameters(*shapes, dtype=torch.float32):
    return [
        (f"p{i}", torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape)) for i, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("num_servers", [1, 2, 3, 5])
def test_shards_when_cut_then_every_row_is_kept_once_and_bytes_are_even_to_within_one_row(num_servers):
    named = parameters((1000, 3), (7,), (), (2, 5, 5), (1, 64), (300, 17))
    shards = plan_shards(named, num_servers)
    even = sum(tensor.nbytes for _, tensor in named) / num_servers
    largest_row = 64 * 4
    assert all(abs(sum(shard.num_bytes for shard in kept) - even) <= largest_row for kept in shards)
    rows = [(s.name, row) for kept in shards for s in kept for row in range(s.start, s.stop)]
    assert sorted(rows) == sorted((name, row) for name, t in named for row in range(t.shape[0] if t.dim() else 1))


def test_shards_when_tensors_stay_whole_then_bytes_are_even_to_within_the_largest():
    named = parameters((40, 10), (30, 10), (30, 10), (5,), ())
    shards = plan_shards(named, 2, cuts_tensors=False)
    loads = [sum(shard.num_bytes for shard in kept) for kept in shards]
    assert sorted(shard.name for kept in shards for shard in kept) == [name for name, _ in named]
    assert all(shard.sizes == shard.shape for kept in shards for shard in kept)
    assert abs(loads[0] - loads[1]) <= 40 * 10 * 4


def test_shards_when_there_are_more_servers_than_rows_then_some_keep_nothing():
    shards = plan_shards(parameters((2, 3)), 4)
    assert sum(len(kept) for kept in shards) == 2
    assert all(shard.num_bytes == 12 for kept in shards for shard in kept)


def test_message_when_filled_through_its_views_then_the_bytes_hold_numbers_and_every_dtype():
    named = [
        ("half", torch.ones(3, dtype=torch.bfloat16)),
        ("one", torch.tensor(2.0)),
        ("long", torch.ones(2, 2).double()),
    ]
    (shards,) = plan_shards(named, 1)
    sent, received = Message(3, shards), Message(3, shards)
    sent.numbers.copy_(torch.tensor([1.0, 2.0, 3.0]))
    for target, (_, tensor) in zip(sent.tensors, named, strict=True):
        target.copy_(tensor)
    received.buffer.copy_(sent.buffer)
    assert received.numbers.tolist() == [1.0, 2.0, 3.0]
    assert all(torch.equal(got, tensor) for got, (_, tensor) in zip(received.tensors, named, strict=True))


def strategy_on(group, model, **options):
    given = spec_of("parameter_server", **options)
    role = role_of(load_strategy("parameter_server"), group, given)
    strategy = role(
        StrategyContext(STRATEGIES["parameter_server"], group, (torch.device("cpu"),), Precision("fp32", "cpu"), given)
    )
    strategy.prepare(model, lambda m: torch.optim.AdamW(m.parameters(), lr=0.1), lambda m, x: m(x).square().mean())
    return strategy


def one_step(strategy):
    if strategy.share.takes_samples:
        batch = Microbatch(batch=torch.ones(4, 256), num_samples=4)
        strategy.forward_backward([batch], global_samples=4 * strategy.serving.num_workers, requests=Requests())
    else:
        strategy.serve_step(Requests())
    strategy.sync_gradients()
    strategy.optimizer_step()


def test_memory_when_divided_then_a_server_has_its_share_of_weights_and_state_and_a_worker_no_state():
    def work(group):
        torch.manual_seed(0)
        strategy = strategy_on(group, nn.Sequential(nn.Linear(256, 300), nn.Linear(300, 100)), servers=3)
        one_step(strategy)
        weights = sum(p.nbytes for p in strategy.model.parameters())
        state = sum(v.nbytes for s in strategy.optimizer.state.values() for v in s.values() if v.dim())
        strategy.close()
        return weights, state

    workers, servers = (answers := on_ranks(5, work))[:2], answers[2:]
    whole = (256 * 300 + 300 + 300 * 100 + 100) * 4
    one_row = 300 * 4
    assert workers == [(whole, 0)] * 2
    for weights, state in servers:
        assert abs(weights - whole / 3) <= one_row
        assert state == 2 * weights  # AdamW keeps two numbers for each


# --- exact in step


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "transport"), [(1, "rpc"), (3, "c10d")])
def test_weights_with_other_than_as_many_servers_as_workers_equal_one_process(servers, transport, trained, tmp_path):
    one = weights_of(trained(Regression(kind="tokens"), **STEPS))
    settings = {"servers": servers, "transport": transport}
    run = train_case(tmp_path, Regression(kind="tokens"), "parameter_server", 2, **settings, **STEPS)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


class Chosen(Regression):
    """Task with an optimiser by its name in torch."""

    name: str = "Adagrad"

    def build_optimizer(self, model):
        groups = [{"params": [p for p in model.parameters() if p.dim() == d], "lr": 0.02} for d in (0, 1, 2)]
        return getattr(torch.optim, self.name)(groups)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adagrad", "Adafactor", "NAdam"])
def test_weights_under_an_optimiser_with_state_from_the_start_or_of_whole_tensors_equal_one_process(name, tmp_path):
    """Adagrad makes its state when it is built; Adafactor looks at whole matrices, which are not cut then."""
    one = weights_of(train_case(tmp_path, Chosen(name=name), **STEPS))
    run = train_case(tmp_path, Chosen(name=name), "parameter_server", 2, **STEPS)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


@pytest.mark.slow
def test_weights_with_parameters_that_some_steps_leave_unused_equal_one_process(tmp_path):
    task = Branching(never=True)
    one = weights_of(train_case(tmp_path, task, **STEPS))
    run = train_case(tmp_path, task, "parameter_server", 2, microbatch_size=2, **STEPS)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


@pytest.mark.slow
def test_bytes_when_counted_then_each_worker_sends_g_and_all_servers_together_p_w(tmp_path):
    run = train_case(tmp_path, Digits(), "parameter_server", 3, servers=2, samples=640, global_batch_size=64)
    sent = [records_of(run, rank)[-1]["sent_bytes"] for rank in range(5)]
    weights = 4 * sum(tensor.numel() for tensor in weights_of(run).values())
    of_numbers = 64 * 2 * 20  # in front of the tensors, and up to the next multiple of 64 before each of them
    assert all(0 <= worker - weights <= of_numbers for worker in sent[:3])
    assert 0 <= sum(sent[3:]) - 3 * weights <= 3 * of_numbers
    assert abs(sent[3] - sent[4]) <= of_numbers + 3 * 4 * 64  # three workers, a row of the layer that is cut


# --- at their own pace


@pytest.mark.slow
def test_weights_of_one_worker_at_its_own_pace_equal_one_process(trained, tmp_path):
    """Nobody changes the weights meanwhile, so every gradient is of the weights that it is applied to."""
    task = Regression(kind="tokens", optimizer="adamw")
    one = weights_of(trained(task, **STEPS))
    run = train_case(tmp_path, task, "parameter_server", 1, servers=2, sync=False, microbatch_size=3, **STEPS)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


class Gentle(Regression):
    """Task with steps so small that nothing depends on their order."""

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=1e-5, weight_decay=0.1)

    def build_schedule(self, optimizer, total_samples):
        return None


@pytest.mark.slow
def test_a_step_of_all_workers_at_their_own_pace_moves_the_weights_as_far_as_one_together(tmp_path):
    settings = {"global_batch_size": 7, "seed": 5}
    short = weights_of(train_case(tmp_path, Gentle(), samples=7, **settings))
    together = weights_of(train_case(tmp_path, Gentle(), samples=70, **settings))
    apart = weights_of(train_case(tmp_path, Gentle(), "parameter_server", 3, sync=False, samples=70, **settings))
    assert largest_difference(apart, together) < 1e-3 * largest_difference(short, together)


class LinearDigits(Digits):
    """Digits without convolutions, whose backward in fp16 takes half a second on a CPU without instructions for it."""

    def build_model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(("precision", "transport"), [("fp16", "c10d"), ("fp32", "rpc")])
def test_digits_are_learned_by_two_workers_at_their_own_pace(precision, transport, tmp_path):
    summary = dure.train(
        LinearDigits(), strategy="parameter_server", nproc=2, precision=precision,
        parameter_server={"sync": False, "transport": transport},
        runs_dir=tmp_path, quiet=True, start="fork", device="cpu", threads=1,
    )  # fmt: skip
    assert summary.metrics["accuracy"].value >= 0.95
    assert any(text.startswith("without sync: a gradient is of weights") for text in summary.not_preserved)
    assert sum(record["measured"]["updates"] for record in records_of(Path(summary.run), 2)) > 0


@dataclass
class Slow(Regression):
    """Rank 1 takes a few milliseconds longer for each step."""

    longer_seconds: float = 0.003

    def loss(self, model, batch):
        if os.environ.get("RANK") == "1" and model.training:
            time.sleep(self.longer_seconds)
        return super().loss(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 3])
def test_no_worker_is_ahead_of_a_slow_one_by_more_than_the_bound_over_200_steps(staleness, tmp_path):
    settings = {"samples": 200 * 6, "global_batch_size": 6, "record_samples": True, "num_samples": 60}
    task = Slow(num_samples=settings.pop("num_samples"))
    run = train_case(tmp_path, task, "parameter_server", 2, servers=1, sync=False, staleness=staleness, **settings)
    fast, slow, server = (records_of(run, rank) for rank in range(3))
    assert len(fast) == len(slow) == len(server) == 200
    ahead = [record["measured"]["steps_ahead"] for record in fast]
    assert max(ahead) == staleness
    # and by the clock: when the fast one is through step t, the slow one is through step t - k - 1
    for record, late in zip(fast[staleness + 1 :], slow, strict=False):
        assert record["time"] > late["time"]
    assert max(record["measured"]["staleness"] for record in slow) <= 2 * staleness + 1
    assert sum(record["measured"]["updates"] for record in server) == 400
    assert list(samples_by_epoch(run)) == [list(range(60))] * 20


@pytest.mark.slow
@pytest.mark.alone
def test_a_worker_without_a_bound_runs_ahead_until_they_meet(tmp_path):
    # 0.2 s, not milliseconds: on a busy machine the fast one's own steps take tens of them
    task = Slow(longer_seconds=0.2)
    run = train_case(tmp_path, task, "parameter_server", 2, sync=False, epochs=2, global_batch_size=4)
    assert max(record["measured"]["steps_ahead"] for record in records_of(run)) > 3
    assert [len(records_of(run, rank)) for rank in range(4)] == [22] * 4


@pytest.mark.slow
def test_checkpoints_that_one_worker_asks_for_by_the_clock_are_made_by_all_at_one_step(tmp_path):
    run = train_case(
        tmp_path, Slow(), "parameter_server", 2, sync=False, epochs=4, global_batch_size=4,
        checkpoint={"every_minutes": 0.02 / 60, "keep": 99},
    )  # fmt: skip
    saved = [int(path.name.split("-")[1]) for path in (run / "checkpoints").glob("samples-*")]
    assert len(set(saved)) > 4  # beside those at the ends of epochs


@pytest.mark.slow
def test_a_run_at_their_own_pace_goes_on_in_step_or_elsewhere_with_its_weights_and_state(tmp_path):
    task = Regression(optimizer="adamw", kind="tokens")
    whole = train_case(tmp_path, task, "parameter_server", 2, sync=False, staleness=1, **SETTINGS)
    alone, *others = [
        weights_of(resumed(back_to(whole, 72, tmp_path / name), strategy=name, nproc=n, **more))
        for name, n, more in (("single", 1, {}), ("ddp", 2, {}), ("parameter_server", 1, {"sync": True}))
    ]
    for weights in others:
        assert largest_difference(weights, alone) < TO_ROUNDING


# --- what cannot be


class Together(Regression):
    def build_optimizer(self, model):
        return torch.optim.LBFGS(model.parameters())


class Sparse(dure.Task):
    def build_model(self):
        return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))

    def train_data(self):
        return dure.data.TensorData(torch.zeros(8, 2, dtype=torch.long))

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model, batch):
        return model(batch[0]).mean()


@pytest.mark.parametrize(
    ("task", "settings", "match"),
    [
        (Sparse(), {}, r"0 gives sparse gradients \(sparse=True\), and servers keep dense rows: use ddp"),
        (Together(), {}, "the optimiser LBFGS cannot be divided over servers, because its step asks for a"),
        (Regression(), {"servers": 0}, "servers is 0 but must be a whole number above 0"),
        (Regression(), {"staleness": -1}, "staleness is -1 but must be a whole number of at least 0"),
        (Regression(), {"strategy": "ddp", "sync": False}, "strategy ddp has no option sync: choose"),
    ],
)
def test_what_cannot_be_is_refused_before_any_process_starts(task, settings, match, tmp_path):
    settings = grouped("parameter_server", {"strategy": "parameter_server", "nproc": 2, **settings})
    with pytest.raises(SpecInvalid, match=match):
        dure.train(task, runs_dir=tmp_path, **settings)
    assert list(tmp_path.iterdir()) == []
