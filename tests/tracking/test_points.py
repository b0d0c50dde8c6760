"""Tests of the points of a run."""

import pytest

from dure.records import events
from dure.records.run_dir import RunDir
from dure.records.step_record import Metric, StepRecord, step_line
from dure.tracking.points import Points


def _step(step, time, **changed):
    fields = {
        "time": time, "step": step, "epoch": 0, "samples_seen": 8 * step, "loss_sum": 16.0, "loss_count": 8.0,
        "data_seconds": 0.1, "forward_backward_seconds": 0.2, "sync_seconds": 0.05, "optimizer_seconds": 0.1,
        "wall_seconds": 0.5, "sent_bytes": 0, **changed,
    }  # fmt: skip
    return step_line(StepRecord(**fields))


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path, "run")


def _points(run, since=(0.0, 0.0), least_seconds=0.0):
    return Points(run, least_seconds=least_seconds, since=since, global_batch_size=8)


def test_points_when_steps_and_an_evaluation_are_on_record_then_each_has_its_values(run):
    run.records_path(0).write_text(_step(1, 10.0, measured={"learning_rate": 0.5, "staleness": 3.0}))
    run.append_event(
        events.Evaluated(
            time=11.0, step=1, samples_seen=8, epochs=1.0, train_loss=2.0, metrics={"acc": Metric(value=0.75, count=4)},
            is_best=True, best_metric="acc", seconds=1.0, seconds_since_last=1.0,
        )
    )  # fmt: skip
    step, evaluation = _points(run).read()
    assert step.values == {
        "train/loss": 2.0, "train/epoch": 0, "samples_seen": 8, "perf/samples_per_second": 16.0,
        "perf/data_fraction": 0.2, "perf/sync_fraction": 0.1, "train/learning_rate": 0.5,
    }  # fmt: skip
    assert (evaluation.step, evaluation.values) == (1, {"val/acc": 0.75, "samples_seen": 8})


def test_points_when_steps_are_close_then_they_are_thinned_but_for_the_last(run):
    run.records_path(0).write_text("".join(_step(step, 10 + step / 100) for step in range(1, 26)))
    points = _points(run, least_seconds=0.1)
    assert [point.step for point in points.read()] == [1, 11, 21]
    assert [point.step for point in points.read(is_last=True)] == [25]
    assert points.read(is_last=True) == []


def test_points_when_a_resume_shortened_the_records_then_only_new_steps_follow(run):
    path = run.records_path(0)
    path.write_text("".join(_step(step, 10.0 + step) for step in range(1, 4)))
    points = _points(run)
    assert [point.step for point in points.read()] == [1, 2, 3]
    path.write_text(_step(1, 11.0) + _step(2, 20.0))
    assert [point.step for point in points.read()] == [2]


def test_points_when_another_process_had_delivered_some_then_the_newer_ones_follow(run):
    run.records_path(0).write_text("".join(_step(step, 10.0 + step) for step in range(1, 4)))
    assert [point.step for point in _points(run, since=(12.0, 0.0)).read()] == [3]


def test_points_when_lines_are_damaged_then_the_others_are_read(run):
    run.records_path(0).write_text(_step(1, 11.0) + '{"step": "x"}\n[1]\n\x00\n' + _step(2, 12.0) + '{"st')
    (run.path / "events.jsonl").write_text('{"event": 3}\n{"time": "late", "event": "evaluated"}\nnull\n')
    assert [point.step for point in _points(run).read()] == [1, 2]


def test_count_left_when_points_were_read_then_only_the_rest_counts(run):
    run.records_path(0).write_text("".join(_step(step, 10.0 + step) for step in range(1, 4)))
    points = _points(run)
    assert points.count_left() == 3
    assert points.count_left() == 0
