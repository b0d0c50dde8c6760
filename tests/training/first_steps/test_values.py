"""Values by which first steps are compared: those that change most, and none that rounding decides."""

from typing import Any

import pytest
import torch

from dure.strategies.state.tensor_shard import TensorShard
from dure.training.first_steps.values import Difference, Recording, SomeValues, chosen, difference, judged


def recorded(states: list[dict[str, Any]], like: Recording | None = None) -> Recording:
    recording = Recording(like)
    recording.begin(states[0])
    for state in states[1:]:
        recording.add(state)
    return recording


def chosen_of(states: list[dict[str, Any]], disturbed: list[dict[str, Any]] | None = None) -> dict[str, SomeValues]:
    recording = recorded(states)
    return dict(chosen(recording, recorded(disturbed or states, recording)))


def test_table_of_which_two_rows_change_then_these_are_among_the_values():
    before = torch.zeros(1000, 4, dtype=torch.float64)
    after = before.clone()
    after[[3, 997]] = 1.0
    places = chosen_of([{"w": before}, {"w": after}])["w"].places
    assert {3 * 4, 997 * 4 + 3} <= set(places)
    assert len(places) > 16


def test_tensor_whose_change_is_the_sign_of_rounding_then_it_is_not_compared():
    before, sign = torch.zeros(64), torch.ones(64)
    sign[::2] = -1.0
    assert not chosen_of([{"w": before}, {"w": 0.01 * sign}], [{"w": before}, {"w": -0.01 * sign}])


def test_value_that_a_step_moves_and_the_next_moves_back_then_rounding_is_that_of_a_step():
    states = [{"w": torch.tensor([value])} for value in (0.0, -1.0, 4.2e-6)]
    values = chosen_of(states, [*states[:2], {"w": torch.tensor([4.3e-6])}])["w"]
    assert values.tolerances[0] > 1e-3


@pytest.mark.parametrize("jump", [1e5, float("inf")])
def test_buffer_that_changes_much_then_a_parameter_is_compared_as_closely(jump):
    states = [{"w": torch.zeros(4), "seen": torch.tensor(0.0)}, {"w": torch.ones(4), "seen": torch.tensor(jump)}]
    recording = Recording(parameters=["w"])
    recording.begin(states[0])
    recording.add(states[1])
    assert max(dict(chosen(recording, recorded(states, recording)))["w"].tolerances) < 0.1


def test_values_of_counters_then_they_must_be_equal():
    zero, two = torch.zeros((), dtype=torch.int64), torch.tensor(2)
    values = chosen_of([{"w": zero}, {"w": two}])["w"]
    assert (values.after, values.tolerances) == ([2.0], [0.0])


def test_shard_then_the_values_inside_it_are_compared():
    whole = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    values = SomeValues(shape=[4, 3], places=[0, 4, 8, 11], after=[0, 4, 8, 11], tolerances=[1e-9] * 4)
    shard = TensorShard(tensor=whole[1:3, 1:].clone(), offsets=(1, 1), shape=(4, 3))
    assert difference(shard, values) == Difference(2, 0, 4.0, 4.0)
    shard.tensor[1, 1] = 9.0
    assert difference(shard, values) == Difference(2, 1, 9.0, 8.0)
    assert difference(TensorShard(tensor=whole[3:, :2], offsets=(3, 0), shape=(4, 3)), values) is None


def test_values_that_are_not_finite_then_they_differ():
    values = SomeValues(shape=[1], places=[0], after=[1.0], tolerances=[1e-9])
    found = difference(TensorShard(tensor=torch.tensor([float("nan")]), offsets=(0,), shape=(1,)), values)
    assert found is not None
    assert found.num_off == 1


def test_few_values_of_many_then_signs_of_tiny_gradients_are_no_difference():
    assert judged([{"w": Difference(32, 3, 1.0, 2.0)}, {"w": Difference(32, 3, 1.0, 2.0)}]).declaration is None
    assert judged([{"b": Difference(1, 1, 1.0, 2.0)}]).declaration is None
    text = judged([{"w": Difference(32, 0, 1.0, 1.0)}, {"w": Difference(32, 30, 1.5, 2.0)}]).declaration
    assert text is not None
    assert "w has a value of 1.5 in the place of 2" in text


def test_gradient_that_is_zero_in_one_process_then_rounding_is_judged_by_other_tensors():
    zero, other = torch.zeros(8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    states = [{}, {"optimizer.a.exp_avg": zero, "optimizer.b.exp_avg": other, "optimizer.a.step": other}]
    values = chosen_of(states)
    assert values["optimizer.a.exp_avg"].tolerances == [1e-9] * 8
    assert values["optimizer.b.exp_avg"].tolerances[0] > 1e-6


def test_table_that_is_recorded_then_few_values_of_it_are_kept():
    """A wide table with two averages would be in memory nine times if each state were a copy."""
    table = torch.zeros(4096, 64)
    recording = recorded([{"w": table}, {"w": table + 1}, {"w": table + 2}])
    assert sum(each.numel() for each in recording.values["w"]) <= 3 * 32
    assert recording.tensors["w"].is_meta
    assert not recording._before
