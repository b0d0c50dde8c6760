"""Records go into files and come back as they were."""

import json
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.records import step_writer as record_writer
from dure.records.step_record import EpochRow, Metric, RunSummary, StepRecord
from dure.records.step_writer import RecordWriter
from dure.strategies.contract.step_clock import StepClock

seconds = st.floats(0, 1e5)


def record(**changes):
    values = {
        "time": 1.75e9, "step": 1, "epoch": 0, "samples_seen": 64, "loss_sum": 1.5, "loss_count": 64,
        "data_seconds": 0.1, "forward_backward_seconds": 0.2, "sync_seconds": 0.3, "optimizer_seconds": 0.4,
        "wall_seconds": 1.0, "sent_bytes": 8,
    }  # fmt: skip
    return StepRecord(**{**values, **changes})


def written(path, *records):
    with RecordWriter(path) as writer:
        for one in records:
            writer.write(one)
    return [json.loads(line) for line in path.read_text().splitlines()]


@given(
    loss_sum=st.floats(allow_nan=False, allow_infinity=False), loss_count=st.one_of(st.integers(0, 10**12), seconds),
    wall=seconds, samples=st.one_of(st.none(), st.lists(st.integers(0, 10**9), max_size=5)),
)  # fmt: skip
def test_a_line_holds_every_field_of_its_record(tmp_path_factory, loss_sum, loss_count, wall, samples):
    one = record(loss_sum=loss_sum, loss_count=loss_count, wall_seconds=wall, samples=samples)
    [line] = written(tmp_path_factory.mktemp("records") / "rank0.jsonl", one)
    expected = {name: value for name, value in one._asdict().items() if value is not None}
    assert line.keys() == expected.keys()
    assert {k: line[k] for k in ("loss_sum", "loss_count", "step", "samples_seen", "sent_bytes")} == {
        k: expected[k] for k in ("loss_sum", "loss_count", "step", "samples_seen", "sent_bytes")
    }
    for name in expected:
        if name.endswith("seconds"):
            assert line[name] == pytest.approx(expected[name], abs=1e-7)


def test_a_resumed_run_appends(tmp_path):
    path = tmp_path / "rank0.jsonl"
    written(path, record(step=1))
    assert [line["step"] for line in written(path, record(step=2), record(step=3))] == [1, 2, 3]


def test_records_are_on_the_disk_after_a_flush_and_at_most_a_moment_later_without(tmp_path, monkeypatch):
    path = tmp_path / "rank0.jsonl"
    with RecordWriter(path) as writer:
        writer.write(record(time=time.time()))
        writer.flush()
        assert len(path.read_text().splitlines()) == 1
        writer.write(record(time=time.time() + 1.5 * record_writer._FLUSH_SECONDS))
        assert len(path.read_text().splitlines()) == 2


def test_records_held_are_written_when_an_error_ends_the_run(tmp_path):
    path = tmp_path / "rank0.jsonl"

    def fail():
        with RecordWriter(path) as writer:
            writer.write(record())
            raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        fail()
    assert len(path.read_text().splitlines()) == 1


def test_a_summary_goes_through_json_and_back():
    metrics = {"loss": Metric(value=0.5, count=355)}
    summary = RunSummary(
        run="runs/x", status="completed", strategy="ddp", world_size=2, num_devices=2, device="cpu", precision="fp32",
        steps=3, samples=64, epochs=1.0, final_loss=0.25, metrics=metrics, best=None, wall_seconds=1.0,
        samples_per_second=64.0,
        rows=[EpochRow(epoch=1.0, samples_seen=64, train_loss=None, metrics=metrics, seconds=0.5)],
    )  # fmt: skip
    assert RunSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary
    with pytest.raises(TypeError, match="unknown"):
        RunSummary.from_json({**summary.to_json(), "unknown": 1})


def test_host_clock_measures_the_spans_between_marks():
    clock = StepClock(torch.device("cpu"))
    marks = [clock.mark()]
    for pause in (0.02, 0.0):
        time.sleep(pause)
        marks.append(clock.mark())
    first, second = clock.spans(marks)
    assert first >= 0.02
    assert 0 <= second < first
