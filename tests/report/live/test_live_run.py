"""State of a run that is watched."""

import json
import math
import os

import numpy as np
import pytest

from dure.records.events import Restarted
from dure.report.live import live_run
from dure.report.live.live_run import LiveRun
from dure.report.live.wording import remarks
from tests.report.live.watched_runs import append, going_on, new_run, start


@pytest.fixture
def run(tmp_path):
    run = new_run(tmp_path / "run")
    run.append_event(start())
    return run


def test_run_when_it_goes_on_then_each_state_has_its_new_steps(run):
    live = LiveRun(run)
    with going_on(run):
        before = live.refresh()
        assert (before.status, before.step, before.is_over) == ("running", None, False)
        append(run, 0, range(1, 11), wall_seconds=0.5)
        append(run, 1, range(1, 10), wall_seconds=0.5)
        after = live.refresh()
    assert (after.step, after.samples_seen, after.samples_per_second) == (10, 80, 16.0)
    assert after.loss == pytest.approx(0.1)
    assert after.part_seconds[1]["wall"] == 0.5
    assert after.sent_bytes == {0: 80.0, 1: 72.0}
    assert after.seconds_quiet < 5
    assert after.records.series.loss.size == 10


def test_run_when_a_record_is_torn_then_it_counts_as_damaged_once_nothing_follows(run):
    append(run, 0, [1])
    with run.records_path(0).open("a") as file:
        file.write('{"version": 1, "time": 17')
    live = LiveRun(run)
    with going_on(run):
        assert live.refresh().records.series.num_left_out == 0
    os.utime(run.records_path(0))
    assert live.refresh().records.series.num_left_out == 1


@pytest.mark.parametrize("line", ["{}", '{"step": 1e400}', "[1]", "null", "\x00\x01", '{"version": 9, "number": 3}'])
def test_run_when_records_are_foreign_then_are_left_out_and_counted(run, line):
    append(run, 0, [1, 2])
    with run.records_path(0).open("a") as file:
        file.write(line + "\n")
    append(run, 0, [3])
    moment = LiveRun(run).refresh()
    assert (moment.step, moment.records.series.num_left_out) == (3, 1)


def test_run_when_values_are_absurd_then_no_sum_of_them_is_an_error(run):
    append(run, 0, range(1, 5), loss_sum=1e308, wall_seconds=1e308, sent_bytes=10**300)
    moment = LiveRun(run).refresh()
    assert moment.step == 4
    assert np.isfinite(moment.sent_bytes[0])


def test_run_when_it_is_resumed_in_mid_run_then_has_each_step_once(run):
    live = LiveRun(run)
    append(run, 0, range(1, 11))
    live.refresh()
    run.undo_records_after(40)
    run.append_event(start(samples_seen=40, step=5))
    append(run, 0, range(6, 8), loss_sum=640.0)
    moment = live.refresh()
    assert moment.records.series.steps.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert moment.loss == 10.0


def test_run_when_ranks_restart_then_the_repeated_steps_count_and_the_restart_is_counted(run):
    live = LiveRun(run)
    append(run, 0, range(1, 11))
    live.refresh()
    run.append_event(Restarted(number=1, rank=1, step=10, message="killed"))
    append(run, 0, range(9, 13))
    moment = live.refresh()
    assert (moment.step, moment.num_restarts, moment.records.series.num_steps) == (12, 1, 12)


def test_run_when_ranks_appear_late_and_vanish_then_the_others_are_shown(run):
    live = LiveRun(run)
    append(run, 0, [1, 2])
    assert live.refresh().records.series.ranks == (0,)
    append(run, 5, [1, 2])
    assert live.refresh().records.series.ranks == (0, 5)
    run.records_path(0).unlink()
    assert live.refresh().records.series.ranks == (5,)


def test_run_on_another_host_when_its_lock_is_not_seen_then_its_growing_records_show_that_it_runs(run):
    live = LiveRun(run)
    append(run, 0, [1])
    assert live.refresh().status == "died"
    append(run, 0, [2])
    assert live.refresh().status == "running"


def test_run_when_it_is_long_then_is_read_in_turns_and_says_how_far(run, monkeypatch):
    monkeypatch.setattr(live_run, "_BUDGET_SECONDS", 0.0)
    monkeypatch.setattr("dure.report.live.growing_file._BLOCK_BYTES", 4096)
    append(run, 0, range(1, 101))
    append(run, 1, range(1, 101))
    live = LiveRun(run)
    moment = live.refresh()
    assert 0 < moment.unread_fraction < 1
    assert "are being read" in next(remarks(moment))
    assert not moment.is_over
    while moment.unread_fraction:
        moment = live.refresh()
    assert moment.records.series.num_steps == 100
    assert moment.status == "died"  # reading on is not growing


def test_run_when_a_file_may_not_be_read_then_names_it(run):
    append(run, 0, [1])
    run.records_path(1).symlink_to(run.records_path(1))
    moment = LiveRun(run).refresh()
    assert moment.step == 1
    assert "rank1.jsonl cannot be read" in moment.records.remarks[0]


def test_run_of_another_version_is_shown_as_far_as_it_is_understood(run):
    (run.path / "spec.json").write_text(json.dumps({"spec": {"unknown": 1}}))
    append(run, 0, [1])
    moment = LiveRun(run).refresh()
    assert (moment.status, moment.step) == ("unreadable", 1)
    assert moment.records.seen.fault


def test_state_before_the_first_step_has_no_numbers(run):
    moment = LiveRun(run).refresh()
    assert math.isnan(moment.loss)
    assert math.isnan(moment.samples_per_second)
    assert moment.seconds_quiet is None
