"""Own steps, their weighted mean, and silence in between: the count of bytes, requests that wait, failures at once."""

import json
import multiprocessing
import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

import dure
from dure.data import TensorData
from dure.errors import Interrupted, SpecInvalid, WorkerFailed
from dure.strategies.contract.step_facts import NO_REQUESTS, Requests
from tests.comm.algorithms.test_kernel_counter import in_own_network
from tests.comm.gloo_ranks import on_ranks
from tests.comm.network_namespace import loopback_bytes, why_not
from tests.conformance.cases import TO_ROUNDING, are_same_bits, largest_difference, records_of, train_case, weights_of
from tests.conformance.tasks import Normalised, Regression
from tests.conformance.test_failures import Poisoned
from tests.conformance.test_resume import SETTINGS, back_to, resumed
from tests.strategies.local_sgd.local_steps import ByHand, prepared, step

STEPS = {"global_batch_size": 7, "samples": 130, "clip_norm": 0.4, "seed": 5}
LOCAL = ["averaging", "diloco"]
ROWS = torch.arange(1.0, 15.0, dtype=torch.float64).view(7, 2)


def linear() -> nn.Module:
    """Return a model whose gradient, under the mean of its answers, is the mean of the rows."""
    model = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=1.0)


# --- what it computes


@pytest.mark.slow
@pytest.mark.parametrize("strategy", LOCAL)
def test_warm_up_equals_ddp(strategy, trained, tmp_path):
    task = Regression(kind="tokens", optimizer="adamw")
    ddp = weights_of(trained(task, "ddp", 3, microbatch_size=2, **STEPS))
    run = train_case(tmp_path, task, strategy, 3, microbatch_size=2, warmup_steps=20, **STEPS)
    assert largest_difference(weights_of(run), ddp) < TO_ROUNDING


class Plain(Regression):
    """Task with plain SGD, whose steps are linear in the gradient."""

    def build_optimizer(self, model):
        return SGD(model.parameters(), lr=0.1, weight_decay=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mean", "tokens"])
def test_averaging_every_step_of_plain_sgd_equals_ddp_however_uneven_the_shares(kind, trained, tmp_path):
    settings = {**STEPS, "clip_norm": None, "microbatch_size": 2}
    ddp = weights_of(trained(Plain(kind=kind), "ddp", 3, **settings))
    run = train_case(tmp_path, Plain(kind=kind), "averaging", 3, average_every=1, **settings)
    assert largest_difference(weights_of(run), ddp) < TO_ROUNDING


@pytest.mark.parametrize(("num_ranks", "optimizer", "kind"), [(2, "sgd", "mean"), (3, "adamw", "tokens")])
def test_weights_equal_those_of_as_many_models_trained_and_averaged_by_hand(num_ranks, optimizer, kind, tmp_path):
    task = Regression(kind=kind, optimizer=optimizer)
    run = train_case(tmp_path, task, "averaging", num_ranks, average_every=3, microbatch_size=2, **STEPS)
    expected = ByHand(task, num_ranks, STEPS).train(every=3)
    assert largest_difference(weights_of(run), expected) < TO_ROUNDING


@pytest.mark.parametrize("strategy", LOCAL)
def test_one_rank_alone_equals_single(strategy, trained, tmp_path):
    one = weights_of(trained(Regression(kind="tokens"), **STEPS))
    # an outer learning rate of 1 without momentum goes where the average is
    outer = {"outer_lr": 1.0, "outer_momentum": 0.0} if strategy == "diloco" else {}
    run = train_case(tmp_path, Regression(kind="tokens"), strategy, 1, average_every=4, **outer, **STEPS)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


def test_a_rank_without_samples_does_not_move_until_the_average():
    def work(group):
        strategy = prepared("averaging", group, linear(), lambda m: AdamW(m.parameters(), lr=0.1), average_every=2)
        facts = step(strategy, ROWS[:2])
        has_moved = bool(strategy.model.weight.any())
        has_state = len(strategy.optimizer.state) > 0
        step(strategy, ROWS)
        return facts.read()[1], has_moved, has_state, strategy.model.weight.tolist()

    first, second, third = on_ranks(3, work)
    assert (first[:3], second[:3], third[:3]) == ((1, True, True), (1, True, True), (0, False, False))
    assert first[3] == second[3] == third[3]


def test_batchnorm_statistics_are_averaged_with_the_parameters():
    rows = torch.tensor([[2.0], [4.0], [6.0], [9.0], [11.0]], dtype=torch.float64)

    def work(group):
        model = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0, dtype=torch.float64), nn.Linear(1, 1).double())
        strategy = prepared("averaging", group, model, sgd, average_every=1)
        step(strategy, rows)
        return model[0].running_mean.item(), model[0].running_var.item()

    # three samples of mean 4 and variance 4, two of mean 10 and variance 2, weighted by their numbers
    assert on_ranks(2, work) == [pytest.approx(((3 * 4 + 2 * 10) / 5, (3 * 4 + 2 * 2) / 5))] * 2


def test_a_run_with_batchnorm_says_that_its_statistics_differ(tmp_path):
    summary = dure.train(
        Normalised(), strategy="averaging", nproc=2, runs_dir=tmp_path, quiet=True, start="fork", device="cpu", **STEPS
    )
    assert any(text.startswith("BatchNorm") for text in summary.not_preserved)


# --- silence


def count_calls(counted):
    """Replace every collective and message of torch.distributed by one that notes its name and bytes first."""

    def counting(name, function):
        def call(*arguments, **keywords):
            flat = [a for argument in arguments for a in (argument if isinstance(argument, list) else [argument])]
            counted.append((name, sum(a.nbytes for a in flat if isinstance(a, torch.Tensor))))
            return function(*arguments, **keywords)

        return call

    names = (
        "all_reduce broadcast all_gather reduce_scatter send recv isend irecv batch_isend_irecv barrier gather scatter"
    )
    for name in names.split():
        setattr(dist, name, counting(name, getattr(dist, name)))


@pytest.mark.parametrize("strategy", LOCAL)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_of_h_steps_all_but_the_last_send_not_one_byte_and_the_last_what_the_formula_says(strategy, num_ranks):
    num_steps, every, warmup = 13, 4, 1

    def work(group):
        model = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 1)).double()
        options = {"average_every": every, "warmup_steps": warmup}
        made = prepared(strategy, group, model, lambda m: AdamW(m.parameters(), lr=0.1), **options)
        counted: list[tuple[str, int]] = []
        count_calls(counted)
        steps = []
        for _ in range(num_steps):
            before = made._all_reduce.sent_bytes
            step(made, ROWS)
            steps.append((list(counted), made._all_reduce.sent_bytes - before, made.sent_bytes(1)))
            counted.clear()
        return steps

    weights_bytes = 8 * (2 * 5 + 5 + 5 + 1)
    answers = on_ranks(num_ranks, work)
    for number in range(warmup + 1, num_steps + 1):
        calls, sent, said = zip(*(steps[number - 1] for steps in answers), strict=True)
        assert sent == said
        if (number - warmup) % every:
            assert (calls, sent) == (([],) * num_ranks, (0,) * num_ranks)
        else:
            # 2 (P-1)/P W from each rank, in whole numbers of elements; and the facts, five numbers
            assert sum(sent) == 2 * (num_ranks - 1) * weights_bytes
            assert max(sent) - min(sent) <= 2 * 8
            assert all(rank_calls[0] == ("all_reduce", 5 * 8) for rank_calls in calls)
    assert all(sent == said > 0 for _, sent, said in (steps[0] for steps in answers))


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "")
def test_between_averagings_the_kernel_sees_not_one_byte_on_the_loopback_interface():
    every, num_periods = 5, 3
    arrived = multiprocessing.get_context("fork").Barrier(2)  # through memory: it sends nothing

    def settled():
        """Return what the interface has carried, once all ranks are here and everything is acknowledged."""
        arrived.wait(20)
        seen, before = loopback_bytes(), None
        while seen != before:
            time.sleep(0.3)
            seen, before = loopback_bytes(), seen
        arrived.wait(20)
        return seen[1]

    def work(group):
        strategy = prepared("averaging", group, nn.Linear(2, 1000).double(), sgd, average_every=every)
        counts = [settled()]
        for _ in range(num_periods):
            for _ in range(every - 1):
                step(strategy, ROWS)
            counts.append(settled())
            step(strategy, ROWS)
            counts.append(settled())
        return [after - before for before, after in pairwise(counts)]

    weights_bytes = 8 * 3000
    for carried in in_own_network(lambda: on_ranks(2, work)):
        assert carried[::2] == [0] * num_periods
        # of both ranks together 2 (P-1) W, and the facts, headers and acknowledgements; a busy
        # machine makes the kernel send segments again, so that the upper bound is for the best period
        assert all(loud > 2 * weights_bytes for loud in carried[1::2])
        assert min(carried[1::2]) < 2.2 * weights_bytes + 4096


def test_records_say_zero_bytes_in_local_steps_and_the_formula_where_it_averages(tmp_path):
    settings = {**STEPS, "average_every": 3, "warmup_steps": 2, "comm": "ring", "epochs": None}
    run = train_case(tmp_path, Regression(layered=True), "averaging", 2, **settings)
    sent = [record["sent_bytes"] for record in records_of(run)]
    weights_bytes = sum(tensor.nbytes for tensor in weights_of(run).values())
    assert sent[:2] == [pytest.approx(weights_bytes, abs=8 * 8)] * 2  # the gradients, one by one
    assert sent[2:] == [weights_bytes if (number - 2) % 3 == 0 else 0 for number in range(3, 21)]


@pytest.mark.parametrize("requests", [Requests(stop=True), Requests(save=True)])
def test_requests_wait_for_the_next_averaging_and_reach_all_ranks_there(requests):
    def work(group):
        strategy = prepared("averaging", group, linear(), sgd, average_every=3)
        mine = requests if group.rank == 1 else NO_REQUESTS
        return [step(strategy, ROWS, mine).read()[2] for _ in range(4)]

    assert on_ranks(2, work) == [[NO_REQUESTS, NO_REQUESTS, requests, NO_REQUESTS]] * 2


class Signalled(Regression):
    """Task whose second rank gets a signal in its fifth step, the first time."""

    sent: str = ""
    """A file that says so."""

    def loss(self, model, batch):
        if os.environ.get("RANK") == "1" and model.training:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 5 and not Path(self.sent).exists():
                Path(self.sent).touch()
                os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch)


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_at_the_next_averaging_and_nothing_is_lost(tmp_path):
    settings = {**STEPS, "average_every": 8, "record_samples": True}
    with pytest.raises(Interrupted, match="continue with") as caught:
        train_case(tmp_path / "runs", Signalled(sent=str(tmp_path / "sent")), "averaging", 2, **settings)
    assert caught.value.exit_code == 143
    (run,) = (tmp_path / "runs").iterdir()
    assert [len(records_of(run, rank)) for rank in (0, 1)] == [8, 8]
    # of the end of the epoch, seven steps, and of the step after it
    assert [path.name for path in sorted((run / "checkpoints").glob("samples-*"))] == [
        f"samples-{samples:012d}" for samples in (44, 44 + 7)
    ]
    summary = dure.train(resume=run, start="fork", quiet=True)
    assert (summary.status, summary.samples) == ("completed", 130)


def test_a_checkpoint_that_a_clock_asks_for_is_saved_at_the_next_averaging(tmp_path):
    settings = {**STEPS, "samples": 42, "average_every": 3, "checkpoint": {"every_minutes": 1e-9, "keep": 99}}
    run = train_case(tmp_path, Regression(), "averaging", 2, **settings)
    assert [path.name for path in sorted((run / "checkpoints").glob("samples-*"))] == [
        f"samples-{samples:012d}" for samples in (21, 42)
    ]


@pytest.mark.parametrize("strategy", LOCAL)
@pytest.mark.parametrize("every", [1, 100], ids=["averaging", "local"])
def test_a_loss_that_is_not_finite_is_named_by_its_own_rank_and_ends_the_run(every, strategy, tmp_path):
    steps = {"global_batch_size": 6, "epochs": 1, "seed": 8, "average_every": every, "record_samples": True}
    healthy = train_case(tmp_path, Regression(), strategy, 2, **steps)
    step, rank, samples = next(
        (record["step"], rank, record["samples"])
        for rank in range(2)
        for record in records_of(healthy, rank)
        if 20 in record["samples"]
    )
    shown = ", ".join(map(str, samples))
    match = rf"the loss is nan at step {step} of epoch 1: rank {rank}, samples \[{shown}\]"
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match=match) as caught:
        train_case(tmp_path / "poisoned", Poisoned(), strategy, 2, **steps)
    assert caught.value.exit_code == 1
    # the other rank knows nothing of it and would wait for ten minutes
    assert time.monotonic() - start < 15
    run = next((tmp_path / "poisoned").iterdir())
    assert len(records_of(run, rank)) == step - 1
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [[c["rank"] for c in e["culprits"]] for e in events if e["event"] == "loss_not_finite"] == [[rank]]


class Uncounted(Regression):
    """Task in whose third batch the second rank's share counts nothing."""

    def train_data(self):
        x, y, mask = super().train_data().tensors
        mask[18:21] = False
        return TensorData(x, y, mask)


def test_a_share_that_counts_nothing_is_no_failure(tmp_path):
    run = train_case(tmp_path, Uncounted(kind="tokens"), "averaging", 2, shuffle=False, average_every=4, **STEPS)
    assert records_of(run, 1)[2]["loss_count"] == 0
    assert all(tensor.isfinite().all() for tensor in weights_of(run).values())


# --- going on


@pytest.mark.slow
@pytest.mark.parametrize("strategy", LOCAL)
def test_resume_in_the_same_place_is_bit_equal_with_dropout(strategy, tmp_path):
    task = Regression(dtype="float32", dropout=0.3, kind="tokens", optimizer="adamw")
    # steps 4, 7 and 11 of which only the last but one ends with an averaging, in and after the warm-up
    settings = {**SETTINGS, "average_every": 3, "warmup_steps": 4}
    whole = train_case(tmp_path, task, strategy, 3, **settings)
    for samples in (28, 44, 72):
        run = resumed(back_to(whole, samples, tmp_path))
        assert are_same_bits(weights_of(run), weights_of(whole))
        assert [r["loss_sum"] for r in records_of(run)] == [r["loss_sum"] for r in records_of(whole)]


class Steep(Regression):
    """Task whose loss is larger, or counts more, on the second rank than on the others."""

    steepness: float = 1.0
    num_items: float = 1.0

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        if os.environ.get("RANK") != "1":
            return loss
        return dure.Sum(loss.total * self.steepness * self.num_items, loss.count * self.num_items)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "steepness", "num_items"),
    [("averaging", 300.0, 1.0), ("diloco", 1.0, 1000.0)],
    ids=["scale", "count"],
)
def test_resume_in_fp16_goes_on_with_one_scale_and_expected_count(strategy, steepness, num_items, tmp_path):
    """Ranks find both in steps of their own, of which some overflow; one of three has no samples in some steps."""
    task = Steep(dtype="float32", kind="tokens", steepness=steepness, num_items=num_items)
    settings = {**SETTINGS, "average_every": 3, "precision": "fp16"}
    whole = train_case(tmp_path, task, strategy, 3, **settings)
    # after step 11, which averages nothing: a step that does leaves the same expectation everywhere
    run = resumed(back_to(whole, 72, tmp_path))
    assert are_same_bits(weights_of(run), weights_of(whole))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", LOCAL)
def test_resume_with_batchnorm_is_bit_equal(strategy, tmp_path):
    whole = train_case(tmp_path, Normalised(dtype="float32"), strategy, 2, average_every=3, **SETTINGS)
    run = resumed(back_to(whole, 58, tmp_path))
    assert are_same_bits(weights_of(run), weights_of(whole))


@pytest.mark.slow
def test_a_deterministic_run_repeats_bit_by_bit(tmp_path):
    task, settings = Regression(dtype="float32", dropout=0.3), {**STEPS, "average_every": 5, "deterministic": True}
    runs = [train_case(tmp_path, task, "averaging", 2, **settings) for _ in range(2)]
    assert are_same_bits(*map(weights_of, runs))


@pytest.mark.slow
def test_steps_are_counted_over_the_whole_run_so_a_resumed_one_averages_where_it_would_have(tmp_path):
    settings = {**SETTINGS, "average_every": 5, "comm": "ring"}
    whole = train_case(tmp_path, Regression(), "ddp", 2, **SETTINGS)
    run = resumed(back_to(whole, 28, tmp_path), strategy="averaging", average_every=5, warmup_steps=6, comm="ring")
    sent = [record["sent_bytes"] > 0 for record in records_of(run)]
    assert settings["epochs"] == 3
    assert [number for number, is_sent in enumerate(sent, 1) if is_sent] == [1, 2, 3, 4, 5, 6, 11, 16, 21]


# --- settings


@pytest.mark.parametrize(
    ("strategy", "other", "option"),
    [("ddp", "averaging", "average_every"), ("ddp", "diloco", "warmup_steps"), ("averaging", "diloco", "outer_lr")],
)
def test_options_that_a_strategy_does_not_have_are_refused(strategy, other, option, tmp_path):
    with pytest.raises(SpecInvalid, match=f"strategy {strategy} has no option {option}: choose strategy="):
        train_case(tmp_path, Regression(), strategy, 2, **{other: {option: 4}}, **STEPS)
