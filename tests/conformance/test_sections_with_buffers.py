"""Models with buffers, cut into sections: skipped steps and restarts from memory end where one process does."""

import time

import pytest

from dure.training.run_state.snapshot_policy import MemorySaver
from tests.commands import RunFiles
from tests.conformance.cases import TO_ROUNDING, largest_difference, train_case, weights_of
from tests.conformance.tasks import Normalised

STEPS = {"samples": 88, "global_batch_size": 8, "microbatch_size": 8, "seed": 4}


class Poisoned(Normalised):
    """Has a sample that is not a number."""

    def train_data(self):
        data = super().train_data()
        data.tensors[0][5] = float("nan")
        return data


@pytest.mark.slow
def test_step_when_it_is_skipped_then_statistics_are_those_of_one_process(tmp_path):
    one, many = (train_case(tmp_path, Poisoned(), *how, on_nonfinite="skip", **STEPS) for how in [(), ("pipeline", 2)])
    assert [len(RunFiles(run).events("step_skipped")) for run in (one, many)] == [2, 2]
    assert largest_difference(weights_of(one), weights_of(many)) < TO_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pipeline", "rpc_model"])
def test_snapshot_when_a_rank_is_late_with_it_then_it_is_of_its_own_step(strategy, tmp_path, monkeypatch):
    take = MemorySaver.take

    def late(self, *args):
        if self.session.group.rank == 1:
            time.sleep(0.1)
        return take(self, *args)

    monkeypatch.setattr(MemorySaver, "take", late)
    faults = tmp_path / "faults.toml"
    faults.write_text('[[fault]]\nrank = 1\nstep = 5\nkind = "kill"\n')
    again = {"faults": faults, "max_restarts": 1, "snapshot_every": 1}
    one = train_case(tmp_path, Normalised(), **STEPS)
    many = train_case(tmp_path, Normalised(), strategy, 2, **again, **STEPS)
    assert largest_difference(weights_of(one), weights_of(many)) < TO_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pipeline", "rpc_model"])
def test_rank_when_killed_then_all_go_on_from_memory_to_the_weights_of_one_process(strategy, tmp_path):
    faults = tmp_path / "faults.toml"
    faults.write_text('[[fault]]\nrank = 1\nstep = 5\nkind = "kill"\n')
    again = {"faults": faults, "max_restarts": 1, "snapshot_every": 1}
    one, many = (
        train_case(tmp_path, Normalised(), **STEPS),
        train_case(tmp_path, Normalised(), strategy, 2, **again, **STEPS),
    )
    (restart,) = RunFiles(many).events("restart")
    assert restart["step"] == 5
    assert largest_difference(weights_of(one), weights_of(many)) < TO_ROUNDING
