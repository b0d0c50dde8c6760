"""Records go into files and come back as they were."""

import errno
import json
import math
import os
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dure.documents import DocumentInvalid
from dure.measure.step_clock import StepClock
from dure.records import full_disk
from dure.records import step_writer as record_writer
from dure.records.jsonl import last_record
from dure.records.step_record import (
    EpochRow,
    Metric,
    RunEnd,
    RunSummary,
    ScriptSummary,
    step_from_json,
)
from dure.records.step_writer import RecordWriter
from tests.record_cases import step_of

seconds = st.floats(0, 1e5)


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
    one = step_of(loss_sum=loss_sum, loss_count=loss_count, wall_seconds=wall, samples=samples)
    [line] = written(tmp_path_factory.mktemp("records") / "rank0.jsonl", one)
    expected = {"version": 1} | {name: value for name, value in one._asdict().items() if value is not None}
    assert line.keys() == expected.keys()
    assert {k: line[k] for k in ("loss_sum", "loss_count", "step", "samples_seen", "sent_bytes")} == {
        k: expected[k] for k in ("loss_sum", "loss_count", "step", "samples_seen", "sent_bytes")
    }
    for name in expected:
        if name.endswith("seconds"):
            assert line[name] == pytest.approx(expected[name], abs=1e-7)
    assert step_from_json(line)._replace(**{name: expected[name] for name in expected if "seconds" in name}) == one


def test_a_resumed_run_appends(tmp_path):
    path = tmp_path / "rank0.jsonl"
    written(path, step_of(step=1))
    assert [line["step"] for line in written(path, step_of(step=2), step_of(step=3))] == [1, 2, 3]


def test_records_are_on_the_disk_after_a_flush_and_at_most_a_moment_later_without(tmp_path, monkeypatch):
    path = tmp_path / "rank0.jsonl"
    with RecordWriter(path) as writer:
        writer.write(step_of(time=time.time()))
        writer.flush()
        assert len(path.read_text().splitlines()) == 1
        writer.write(step_of(time=time.time() + 1.5 * record_writer._FLUSH_SECONDS))
        assert len(path.read_text().splitlines()) == 2


def test_records_when_the_clock_is_set_back_then_they_are_held_no_longer(tmp_path):
    path = tmp_path / "rank0.jsonl"
    with RecordWriter(path) as writer:
        writer.write(step_of(time=time.time() - 3600.0))
        assert len(path.read_text().splitlines()) == 1


def test_records_held_are_written_when_an_error_ends_the_run(tmp_path):
    path = tmp_path / "rank0.jsonl"

    def fail():
        with RecordWriter(path) as writer:
            writer.write(step_of(time=time.time()))
            raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        fail()
    assert len(path.read_text().splitlines()) == 1


def test_records_when_the_disk_is_full_for_a_moment_then_all_are_written_once(tmp_path, monkeypatch, capsys):
    path, refusals, write = tmp_path / "rank0.jsonl", [0, 1, 2], os.write

    def full_for_a_moment(descriptor, data):
        if refusals and not refusals.pop(0):
            return write(descriptor, data[:7])
        if refusals:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(full_disk, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(record_writer.os, "write", full_for_a_moment)
    with RecordWriter(path) as writer:
        writer.write(step_of(step=1))
        writer.write(step_of(step=2))
    monkeypatch.undo()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    assert capsys.readouterr().err.count("waits for space for its records, at most 30 s") == 1


@pytest.mark.parametrize(("number", "most_seconds"), [(errno.ENOSPC, 0.0), (errno.EFBIG, 30.0), (errno.EIO, 30.0)])
def test_records_when_there_is_no_space_for_long_or_another_reason_then_that_is_raised(
    number, most_seconds, tmp_path, monkeypatch
):
    def refuse(descriptor, data):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(full_disk, "MOST_SECONDS", most_seconds)
    monkeypatch.setattr(record_writer, "SPACE_WAIT", full_disk.SpaceWait())
    writer = RecordWriter(tmp_path / "rank0.jsonl")
    writer.write(step_of(time=time.time()))
    monkeypatch.setattr(record_writer.os, "write", refuse)
    with pytest.raises(OSError, match=os.strerror(number)):
        writer.close()


def test_a_summary_goes_through_json_and_back():
    metrics = {"loss": Metric(value=0.5, count=355)}
    summary = RunSummary(
        run="runs/x", status="completed", strategy="ddp", world_size=2, num_devices=2, device="cpu", precision="fp32",
        steps=3, samples=64, epochs=1.0, final_loss=0.25, metrics=metrics, best=None, wall_seconds=1.0,
        samples_per_second=64.0,
        rows=[EpochRow(epoch=1.0, samples_seen=64, train_loss=None, metrics=metrics, seconds=0.5)],
    )  # fmt: skip
    assert RunSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary
    assert RunSummary.from_json({**summary.to_json(), "version": 2, "mood": "good"}) == summary
    with pytest.raises(DocumentInvalid, match=r"holds other fields than it should \(steps"):
        RunSummary.from_json({**summary.to_json(), "steps": "many"})


@pytest.mark.parametrize(
    ("name", "value"),
    [("step", -1), ("step", 1.5), ("time", math.nan), ("samples_seen", "x"), ("loss_sum", None), ("samples", [-1])],
)
def test_a_step_when_a_field_is_none_of_its_kind_is_refused(name, value):
    with pytest.raises(DocumentInvalid, match=rf"holds other fields than it should \({name}"):
        step_from_json({**step_of()._asdict(), name: value})


def test_a_step_of_a_newer_dure_is_read_as_far_as_it_is_known():
    one = step_of(loss_sum=math.nan, measured={"staleness": 1.0})
    found = step_from_json({**one._asdict(), "version": 2, "mood": "good"})
    assert found._replace(loss_sum=0) == one._replace(loss_sum=0)


def test_the_end_of_a_script_is_read_from_its_summary():
    end = RunEnd.from_json(ScriptSummary(status="failed", world_size=2, wall_seconds=1.0, message="no").to_json())
    assert (end.status, end.world_size, end.message, end.samples) == ("failed", 2, "no", None)


def test_host_clock_measures_the_spans_between_marks():
    clock = StepClock(torch.device("cpu"))
    marks = [clock.mark()]
    for pause in (0.02, 0.0):
        time.sleep(pause)
        marks.append(clock.mark())
    first, second = clock.spans(marks)
    assert first >= 0.02
    assert 0 <= second < first


def test_last_record_when_its_line_is_long_and_the_one_behind_it_torn_then_it_is_found(tmp_path) -> None:
    file = tmp_path / "rank0.jsonl"
    samples = [*range(40_000)]
    file.write_text(f'{{"step": 1}}\n{{"step": 2, "samples": {samples}}}\n{{"step": 3, "samples": {str(samples)[:-9]}')
    assert last_record(file)["step"] == 2


def test_last_record_when_there_is_none_then_it_is_empty_and_not_all_of_the_file_is_parsed(tmp_path) -> None:
    file = tmp_path / "rank0.jsonl"
    file.write_text('{"step": 1}\n' + "no record\n" * 100_000)
    assert last_record(file) == {}
    file.write_text("")
    assert last_record(file) == {}
