"""Steps of a growing run in bounded memory."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from dure.records.run_dir import RunDir
from dure.records.step_columns import rows_of_lines
from dure.records.step_record import step_line
from dure.report.live.step_spans import NUM_RECENT, RankSpans, StepSpans
from dure.report.run_series import COLUMNS, MOST_POINTS, run_series
from tests.record_cases import step_of

RUN_FOLDERS = Path(__file__).parents[2] / "samples" / "run_folders"


def rows(steps, **fields):
    lines = [step_line(step_of(step=s, samples_seen=8 * s, time=float(s), **fields)).encode() for s in steps]
    return rows_of_lines(lines, COLUMNS)[1]


def spans_of(run, block=7):
    found = StepSpans()
    for rank in run.recorded_ranks():
        lines = run.records_path(rank).read_bytes().splitlines()
        for begin in range(0, len(lines), block):
            _, table, left = rows_of_lines(lines[begin : begin + block], COLUMNS)
            found.rank(rank).add(table)
            found.rank(rank).num_left_out += left
            found.limit()
    return found


@pytest.mark.parametrize("name", sorted(path.name for path in RUN_FOLDERS.iterdir()))
def test_series_of_every_kind_of_run_are_those_of_the_report(name):
    run = RunDir(RUN_FOLDERS / name)
    expected, found = run_series(run), spans_of(run).series()
    for field in fields(expected):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, dict):
            one, other = [*one.values()], [*other.values()]
        if other is None or (field.name == "late_seconds" and not other.size):
            continue
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12, err_msg=field.name)


def test_points_when_there_are_many_steps_then_their_number_is_bounded_and_nothing_is_lost():
    found = StepSpans()
    for begin in range(1, 20_001, 1000):
        found.rank(0).add(rows(range(begin, begin + 1000), loss_sum=3.0, loss_count=2, wall_seconds=0.5))
        found.limit()
    series = found.series()
    assert MOST_POINTS / 2 <= series.steps.size <= MOST_POINTS
    assert (series.num_steps, series.steps_per_point, series.steps[-1]) == (20_000, 64, 20_000)
    assert set(series.loss) == {1.5}
    assert set(series.samples_per_second) == {16.0}
    assert (series.samples_seen[-1], series.times) == (160_000.0, (1.0, 20_000.0))
    assert len(found.rank(0).recent) == NUM_RECENT


def test_steps_when_a_restart_repeats_them_then_the_last_records_count():
    found = StepSpans()
    found.rank(0).add(rows(range(1, 11), loss_sum=1.0, loss_count=1))
    found.rank(0).add(rows(range(6, 9), loss_sum=2.0, loss_count=1))
    series = found.series()
    assert series.steps.tolist() == [*range(1, 9)]
    assert series.loss.tolist() == [1.0] * 5 + [2.0] * 3
    assert not np.isnan(series.samples_per_second).any()
    assert found.rank(0).recent[:, 0].tolist() == [*range(1, 9)]


def test_steps_when_a_restart_repeats_part_of_a_span_then_no_step_counts_twice():
    spans = RankSpans()
    spans.add(rows(range(1, 101)))
    spans.coarsen(16)
    spans.add(rows(range(40, 101)))
    assert spans.of("steps").sum() == pytest.approx(100)
    assert spans.of("samples_seen").tolist() == sorted(spans.of("samples_seen"))
    assert spans.last_step == 100


def test_steps_when_a_damaged_record_has_a_huge_number_then_the_next_one_takes_it_back():
    found = StepSpans()
    found.rank(0).add(rows([1, 2, 2**53 - 1, 3]))
    found.limit()
    assert found.series().steps.tolist() == [1, 2, 3]


def test_ranks_when_they_come_and_go_then_have_no_value_where_they_are_missing():
    found = StepSpans()
    found.rank(0).add(rows([1, 2, 3], wall_seconds=1.0, sync_seconds=0.5))
    found.rank(2).add(rows([1, 2], wall_seconds=1.0, sync_seconds=0.125))
    np.testing.assert_equal(found.series().late_seconds, [[0, 0, 0], [0.375, 0.375, np.nan]])
    found.forget(2)
    assert found.series().ranks == (0,)
    found.forget(0)
    assert found.series().num_steps == 0
    assert found.series().times is None
