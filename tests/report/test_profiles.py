"""Tests of the trace of all ranks."""

import gzip
import json

import pytest

from dure.records.rank_profiles import TRACE, facts_path, operators_path
from dure.records.run_dir import RunDir
from dure.records.step_record import step_line
from dure.report.profiles import has_profiles, is_trace_due, merge_profiles
from tests.record_cases import step_of
from tests.report.traces import checked_trace, operators_of, steps_of

_BASE = 1_700_000_000_000_000_000
_START = 1_700_000_100.0
"""Seconds since the epoch at which step 1 begins; a step takes a second."""


def _operator(second, name="aten::mm", **changed):
    ts = (_START + second) * 1e6 - _BASE / 1e3
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 4711, "tid": 4711, "ts": ts, "dur": 1000.0, **changed}


@pytest.fixture
def run(tmp_path):
    return RunDir.create(tmp_path, "run")


def _rank(run, rank, events=(), *, host="one", ahead=0.0, steps=(4, 5), num_recorded=6, fault=None):
    lines = [
        step_line(step_of(step=step, time=_START + ahead + step, wall_seconds=1.0))
        for step in range(1, num_recorded + 1)
    ]
    run.records_path(rank).write_text("".join(lines))
    facts = facts_path(run.path, rank)
    facts.parent.mkdir(exist_ok=True)
    facts.write_text(json.dumps({"rank": rank, "host": host, "steps": list(steps), "fault": fault}))
    trace = {"baseTimeNanoseconds": _BASE, "traceEvents": list(events)}
    operators_path(run.path, rank).write_bytes(gzip.compress(json.dumps(trace).encode()))


def test_merge_when_two_ranks_have_profiles_then_steps_and_operators_are_on_one_clock(run):
    _rank(run, 0, [_operator(3.5), _operator(4.5, "aten::add")])
    _rank(run, 1, [_operator(3.75, pid=4712, tid=4712)])
    merged = merge_profiles(run)
    events = checked_trace(run.path / TRACE)
    assert (merged.ranks, merged.ranks_with_operators, merged.num_steps) == ((0, 1), (0, 1), 2)
    assert [(event["name"], event["ts"]) for event in steps_of(events, 1)] == [("step 4", 0.0), ("step 5", 1e6)]
    assert [(event["name"], event["ts"]) for event in operators_of(events, 0)] == [
        ("aten::mm", pytest.approx(0.5e6, abs=1)),
        ("aten::add", pytest.approx(1.5e6, abs=1)),
    ]
    assert operators_of(events, 1)[0]["ts"] == pytest.approx(0.75e6, abs=1)
    assert (run.path / TRACE).stat().st_mode & 0o777 == 0o600


def test_merge_when_a_host_has_another_clock_then_its_events_are_moved(run):
    _rank(run, 0, [_operator(3.5)])
    _rank(run, 1, [_operator(3.5 + 7.25)], host="two", ahead=7.25)
    _rank(run, 2, [_operator(3.5 + 0.25)], ahead=0.25)
    merged = merge_profiles(run)
    events = checked_trace(run.path / TRACE)
    assert merged.offset_seconds == {1: pytest.approx(7.25)}
    assert steps_of(events, 1)[0]["ts"] == pytest.approx(steps_of(events, 0)[0]["ts"], abs=1)
    assert operators_of(events, 1)[0]["ts"] == pytest.approx(0.5e6, abs=1)
    # a rank of the same host is late, and its clock is right
    assert operators_of(events, 2)[0]["ts"] == pytest.approx(0.75e6, abs=1)
    labels = [event["args"]["labels"] for event in events if event["name"] == "process_labels"]
    assert labels == ["clock moved by -7250.0 ms"]


def test_merge_when_a_rank_died_then_its_steps_and_its_operators_are_kept(run):
    _rank(run, 0, [_operator(3.5)])
    _rank(run, 1, [_operator(3.5)], num_recorded=4)
    _rank(run, 2, num_recorded=4)
    facts_path(run.path, 2).unlink()
    operators_path(run.path, 2).unlink()
    merged = merge_profiles(run)
    events = checked_trace(run.path / TRACE)
    assert len(operators_of(events, 1)) == 1
    assert [event["name"] for event in steps_of(events, 2)] == ["step 4"]
    assert merged.faults == {2: "it ended before its profile was written"}


def test_merge_when_ranks_have_the_same_flows_then_each_keeps_its_own(run):
    begin, end = {"ph": "s", "id": 7, "cat": "fwdbwd"}, {"ph": "f", "id": 7, "bp": "e", "cat": "fwdbwd"}
    flows = [_operator(3.5) | begin, _operator(3.75) | end]
    _rank(run, 0, flows)
    _rank(run, 1, flows)
    merge_profiles(run)
    ids = {event["id"] for event in checked_trace(run.path / TRACE) if "id" in event}
    assert len(ids) == 2


def test_merge_when_a_rank_has_a_gpu_then_its_streams_are_rows_of_the_rank(run):
    # as torch.profiler writes it: the process is the device's number, and the thread the stream's
    names = [
        {"ph": "M", "name": "thread_name", "ts": 0, "pid": 0, "tid": stream, "args": {"name": f"stream {stream}"}}
        for stream in (0, 7)
    ]
    kernels = [
        _operator(3.5 + stream / 100, "void gemm<float>()", cat="kernel", pid=0, tid=stream) for stream in (0, 7)
    ]
    _rank(run, 0, [_operator(3.4), *names, *kernels])
    merge_profiles(run)
    events = checked_trace(run.path / TRACE)
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows == {0: "steps", 1: "main thread", 2: "stream 0", 3: "stream 7"}
    assert [event["tid"] for event in operators_of(events, 0) if event["cat"] == "kernel"] == [2, 3]


def test_merge_when_events_are_foreign_then_those_of_the_rank_are_kept(run):
    foreign = [
        3, None, {}, {"ph": "X"},
        _operator(3.5, pid="Spans"), _operator(3.5, ts="now"), _operator(3.5, ts=float("nan")),
        _operator(3.5, dur=-1.0), _operator(3.5, ph="Z"), _operator(3.5, name=["x"]), _operator(1.5),
        _operator(3.6, "\x1b[2J\u202eevil", args=[1], cat=3),
    ]  # fmt: skip
    _rank(run, 0, foreign)
    merge_profiles(run)
    (kept,) = operators_of(checked_trace(run.path / TRACE), 0)
    assert kept["name"] == r"\x1b[2J\u202eevil"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x1f\x8b",
        b"{}",
        gzip.compress(b"[1]"),
        gzip.compress(b'{"traceEvents": '),
        gzip.compress(b'{"traceEvents": []}')[:10] + b"\xff" * 20,  # no deflated data
    ],
    ids=["empty", "cut off", "not compressed", "a list", "half", "not deflated"],
)
def test_merge_when_a_profile_is_damaged_then_the_others_are_read(run, data):
    _rank(run, 0, [_operator(3.5)])
    _rank(run, 1)
    operators_path(run.path, 1).write_bytes(data)
    facts_path(run.path, 1).write_bytes(b'{"steps": "all"}')
    assert merge_profiles(run).ranks_with_operators == (0,)
    assert len(steps_of(checked_trace(run.path / TRACE), 1)) == 2


def test_merge_when_a_rank_has_too_many_operators_then_the_first_are_kept_and_the_rest_counted(run, monkeypatch):
    monkeypatch.setattr("dure.report.profiles._MOST_EVENTS", 2)
    _rank(run, 0, [_operator(3.7), _operator(3.5), _operator(3.6)])
    assert merge_profiles(run).num_left_out == 1
    times = [event["ts"] for event in operators_of(checked_trace(run.path / TRACE), 0)]
    assert times == [pytest.approx(0.5e6, abs=1), pytest.approx(0.6e6, abs=1)]


def test_is_trace_due_when_profiles_are_newer_then_until_they_are_merged(run):
    assert not has_profiles(run)
    assert not is_trace_due(run)
    _rank(run, 0)
    assert is_trace_due(run)
    merge_profiles(run)
    assert has_profiles(run)
    assert not is_trace_due(run)
