"""The one loop: schedules in samples, exact times, requests, and how it stops."""

import os
import signal
import time

import pytest
import torch
from torch import nn

from dure.data import TensorData
from dure.errors import Interrupted, TaskInvalid
from dure.strategies.contract.step_facts import Requests
from dure.training.loop import TrainingLoop, check_schedule
from dure.training.session.loader import Loader, SampleFetch
from dure.training.session.sample_order import SampleOrder
from tests.conformance.cases import records_of, train_case
from tests.conformance.tasks import Regression
from tests.strategies.contract.test_base import prepared
from tests.training.session.test_session import ROWS, Small, constant, train


def loop_over(num_samples, *, batch=2, microbatch=None, schedule=None, requested=Requests, rate=1.0, loss=None):
    """Return a loop of one process over rows of ones."""
    data = TensorData(torch.ones(num_samples, 2, dtype=torch.float64))
    strategy = prepared(loss or (lambda model, batch: 0.01 * model(batch[0]).mean()))
    strategy.optimizer.param_groups[0]["lr"] = rate
    if schedule is not None:
        check_schedule(schedule, strategy.optimizer)
    loader = Loader(SampleFetch(data, None, 0), torch.device("cpu"), 0)
    return TrainingLoop(
        strategy, loader, SampleOrder(num_samples, batch, seed=0), microbatch_size=microbatch, schedule=schedule,
        requested=requested, record_samples=True,
    )  # fmt: skip


def run(loop, samples_seen, total, step=0):
    return list(loop.boundaries(samples_seen, total, step))


@pytest.mark.parametrize(("asked", "at_once"), [(None, 7), (3, 3), (4, 4), (6, 4)])
def test_microbatch_when_a_step_is_under_way_then_it_is_the_largest_of_it(asked, at_once):
    seen = []

    def loss(model, batch):
        seen.append(loop.microbatch_under_way())
        return 0.01 * model(batch[0]).mean()

    loop = loop_over(9, batch=7, microbatch=asked, loss=loss)
    between = [loop.microbatch_under_way() for _ in loop.boundaries(0, 9, 0)]
    assert seen[0] == at_once
    assert seen[-1] == 2
    assert {*between, loop.microbatch_under_way()} == {None}


def test_loop_counts_steps_samples_and_epochs_from_any_position():
    whole = run(loop_over(5), 0, 12)
    assert [(b.step, b.batch.epoch, b.batch.samples_seen, len(b.batch.indices)) for b in whole] == [
        (1, 0, 2, 2), (2, 0, 4, 2), (3, 0, 5, 1), (4, 1, 7, 2), (5, 1, 9, 2), (6, 1, 10, 1), (7, 2, 12, 2),
    ]  # fmt: skip
    later = run(loop_over(5), 7, 12, step=4)
    assert [b.outcomes[0].record.samples for b in later] == [b.outcomes[0].record.samples for b in whole[4:]]
    assert [b.step for b in later] == [5, 6, 7]


def test_schedule_is_asked_with_the_samples_seen_before_each_step_whatever_the_batch():
    for batch, seen in ((2, [0, 2, 4, 5, 7]), (5, [0, 5]), (1, list(range(9)))):
        asked = []

        def schedule(samples, asked=asked):
            asked.append(samples)
            return 0.5

        run(loop_over(5, batch=batch, schedule=schedule), 0, 9)
        assert asked[2:] == seen  # the first questions are whether it is a function of samples


def test_schedule_that_counts_its_calls_is_refused():
    calls = []

    def schedule(samples):
        calls.append(samples)
        return 1 / len(calls)

    with pytest.raises(TaskInvalid, match=r"schedule gave 1 and then 0\.5 for no samples"):
        check_schedule(schedule, torch.optim.SGD([torch.zeros(1)]))


def test_schedule_is_a_factor_on_each_groups_own_first_rate():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "lr": 0.1}])
    check_schedule(lambda samples: 0.5, optimizer)
    assert [group["initial_lr"] for group in optimizer.param_groups] == [1.0, 0.1]
    check_schedule(None, optimizer)
    with pytest.raises(TaskInvalid, match="build_schedule gave CosineAnnealingLR: return a function from samples seen"):
        check_schedule(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2), optimizer)


def test_learning_rate_of_a_step_is_the_schedules():
    loop = loop_over(4, schedule=lambda samples: 1 / (1 + samples), rate=3.0)
    rates = [loop.strategy.optimizer.param_groups[0]["lr"] for _ in loop.boundaries(0, 8, 0)]
    assert rates == pytest.approx([3.0, 1.0, 3 / 5, 3 / 7], rel=1e-15)


def test_requests_come_back_with_the_step_in_which_they_were_made():
    answers = iter([Requests(), Requests(save=True), Requests(stop=True), Requests()])
    boundaries = run(loop_over(8, requested=lambda: next(answers)), 0, 8)
    assert [b.outcomes[0].requests for b in boundaries] == [
        (False, False),
        (False, True),
        (True, False),
        (False, False),
    ]


def test_spans_of_a_step_add_up_to_its_wall_time():
    def slow_loss(model, batch):
        time.sleep(0.01)
        return 0.01 * model(batch[0]).mean()

    records = [b.outcomes[0].record for b in run(loop_over(12, batch=3, microbatch=1, loss=slow_loss), 0, 12)]
    assert all(record.forward_backward_seconds >= 0.03 for record in records)
    check_spans([record._asdict() for record in records], least_fraction=0.8)


def check_spans(records, *, least_fraction):
    """Check that no span is negative, none overlaps another, and little of the wall time is in none."""
    named = 0.0
    for record in records:
        spans = [record[f"{span}_seconds"] for span in ("data", "forward_backward", "sync", "optimizer")]
        assert min(spans) >= 0
        assert sum(spans) <= record["wall_seconds"] + 1e-6  # each is written with seven digits
        named += sum(spans)
    assert named > least_fraction * sum(record["wall_seconds"] for record in records)


@pytest.mark.parametrize(("strategy", "nproc"), [("single", 1), ("dp", 2), ("balanced_dp", 2), ("ddp", 2), ("ddp", 3)])
def test_records_times_add_up_and_sent_bytes_are_the_formulas(strategy, nproc, tmp_path):
    path = train_case(tmp_path, Regression(), strategy, nproc, epochs=1, global_batch_size=6, microbatch_size=2)
    g = (36 + 6 + 6 + 1) * 8  # two biases, one tied weight, the scale, in float64
    w = g + (36 + 6) * 8  # and the frozen layer
    facts_bytes = 4 * 8
    for record in records_of(path):
        microsteps = -(-(6 if record["step"] < 8 else 2) // (2 * nproc))
        assert (
            record["sent_bytes"]
            == {
                "single": 0,
                "dp": microsteps * (nproc - 1) * (w + g),
                "balanced_dp": (nproc - 1) * (w + g),
                "ddp": 2 * (nproc - 1) * (g + facts_bytes) // nproc,
            }[strategy]
        )
    check_spans(records_of(path), least_fraction=0.5)


def test_a_signal_ends_the_run_at_a_step_with_a_checkpoint_from_which_it_goes_on(tmp_path):
    class Signalling(Small):
        def loss(self, model, batch):
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().loss(model, batch)

    with pytest.raises(Interrupted, match=r"stopped; continue with `dure\.train\(resume='.*stopped'\)`") as caught:
        train(Signalling, tmp_path, name="stopped")
    assert caught.value.exit_code == 143
    # the second step's requests were asked before the signal came; the third carries it
    records = records_of(tmp_path / "stopped")
    assert [record["step"] for record in records] == [1, 2, 3][: len(records)]
    assert (tmp_path / "stopped" / "checkpoints" / f"samples-{records[-1]['samples_seen']:012d}").is_dir()


def test_a_run_evaluates_and_saves_as_often_as_asked_and_at_the_end(tmp_path):
    task = type("T", (Small,), {"eval_data": constant(ROWS)})
    summary = train(task, tmp_path, epochs=2.5, eval_every_epochs=0.5, checkpoint={"every_samples": 4, "keep": 9})
    assert [row.samples_seen for row in summary.rows] == [4, 6, 10, 12, 15]
    saved = sorted(
        int(p.name.split("-")[1]) for p in (tmp_path / summary.run.split("/")[-1] / "checkpoints").glob("samp*")
    )
    assert set(saved) >= {4, 6, 8, 12, 15}
    assert summary.best["metric"] == "loss"


def test_loader_when_the_caller_leaves_between_two_steps_then_it_is_released():
    loop, released = loop_over(9), []
    batches = loop.samples._loader.batches

    def watched(requests):
        try:
            yield from batches(requests)
        finally:
            released.append(True)

    loop.samples._loader.batches = watched
    for _ in loop.boundaries(0, 9, 0):
        break
    assert released == [True]
