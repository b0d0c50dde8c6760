"""Interval between snapshots in memory."""

import pytest

from dure.training.run_state.snapshot_policy import steps_between


@pytest.mark.parametrize(
    ("cost", "step", "expected"),
    [(0.0001, 0.1, 1), (0.0008, 0.02, 1), (0.00081, 0.02, 3), (0.0006, 0.001, 30), (1.0, 2.0, 25)],
)
def test_snapshots_when_every_step_would_cost_more_than_4_percent_then_they_take_2(cost, step, expected):
    assert steps_between(cost, step) == expected
