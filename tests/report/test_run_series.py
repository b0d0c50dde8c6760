"""Series of a run for charts."""

import numpy as np
import pytest

from dure.records.run_dir import RunDir
from dure.records.step_record import step_line
from dure.report.run_series import MOST_POINTS, MOST_SPANS, run_series
from tests.record_cases import step_of


@pytest.fixture
def run(tmp_path):
    (tmp_path / "spec.json").write_text("{}")
    return RunDir(tmp_path)


def write(run, rank, steps, **fields):
    lines = [step_line(step_of(step=step, samples_seen=10 * step, time=step, **fields)) for step in steps]
    run.records_path(rank).write_text("".join(lines))


def test_points_when_there_are_many_steps_then_are_means_of_equally_many(run):
    write(run, 0, range(1, 2 * MOST_POINTS + 1), loss_sum=3.0, loss_count=2, wall_seconds=0.5)
    series = run_series(run)
    assert (series.num_steps, series.steps.size, series.span_steps.size) == (2 * MOST_POINTS, MOST_POINTS, MOST_SPANS)
    assert series.steps[:2].tolist() == [2, 4]
    assert series.samples_seen[-1] == 20 * MOST_POINTS
    assert set(series.loss) == {1.5}
    assert set(series.samples_per_second) == {20.0}
    assert series.times == (1.0, 2.0 * MOST_POINTS)


def test_lateness_when_one_rank_computes_longer_then_only_it_is_late(run):
    write(run, 0, [1, 2, 3], wall_seconds=1.0, sync_seconds=0.5)
    write(run, 2, [1, 2], wall_seconds=1.0, sync_seconds=0.125)
    series = run_series(run)
    assert series.ranks == (0, 2)
    np.testing.assert_equal(series.late_seconds, [[0, 0, 0], [0.375, 0.375, np.nan]])


def test_parts_when_they_are_added_up_then_are_the_wall_time(run):
    write(run, 0, [1, 2], wall_seconds=2.0)
    parts = run_series(run).part_seconds
    assert {name: round(float(values[0]), 6) for name, values in parts.items()} == {
        "data": 0.1, "forward_backward": 0.2, "optimizer": 0.4, "sync": 0.3, "other": 1.0,
    }  # fmt: skip


def test_throughput_when_the_step_before_is_not_on_record_then_is_unknown_and_not_huge(run):
    write(run, 0, [5, 6], wall_seconds=1.0)
    assert run_series(run).samples_per_second.tolist()[1] == 10.0
    assert np.isnan(run_series(run).samples_per_second[0])


def test_series_when_nothing_was_counted_or_recorded_then_have_no_values(run):
    assert run_series(run).num_steps == 0
    assert run_series(run).times is None
    write(run, 0, [1], loss_count=0)
    assert np.isnan(run_series(run).loss).all()


def test_series_when_a_line_is_damaged_then_it_is_counted(run):
    write(run, 0, [1, 2])
    with run.records_path(0).open("a") as file:
        file.write('{"step": \n')
    series = run_series(run)
    assert (series.num_steps, series.num_left_out) == (2, 1)


@pytest.mark.parametrize("known", [(0.125, 0.15), (0.125, None)])
def test_parts_when_all_ranks_have_measured_their_backward_then_it_is_one_of_them(run, known):
    for rank, backward in enumerate(known):
        write(run, rank, [1, 2], wall_seconds=2.0, backward_seconds=backward)
    parts = run_series(run).part_seconds
    if None in known:
        assert [*parts] == ["data", "forward_backward", "sync", "optimizer", "other"]
    else:
        assert [*parts] == ["data", "forward", "backward", "sync", "optimizer", "other"]
        np.testing.assert_allclose(parts["forward"], [0.075, 0.05])
        np.testing.assert_allclose(parts["backward"], known)
        np.testing.assert_allclose(sum(parts.values()), 2.0)
