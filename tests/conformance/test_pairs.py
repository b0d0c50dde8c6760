"""A run may go on under any other strategy and number of devices: every exact strategy writes for the next.

No strategy knows who wrote a checkpoint, so that all pairs would show no more than these.
"""

import functools
from pathlib import Path

import pytest

from dure.strategies.table import STRATEGIES
from tests.conformance.cases import TO_ROUNDING, largest_difference, samples_by_epoch, train_case, weights_of
from tests.conformance.tasks import Regression
from tests.conformance.test_resume import back_to, resumed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXACT = [name for name, info in STRATEGIES.items() if info.is_exact]
PAIRS = list(zip(EXACT, [*EXACT[1:], EXACT[0]], strict=True))
SETTINGS = {
    "global_batch_size": 7, "epochs": 2, "seed": 2, "clip_norm": 0.4,
    "checkpoint": {"every_samples": 28, "keep": 99}, "record_samples": True,
}  # fmt: skip


def devices_of(strategy: str, num_devices: int) -> int:
    return num_devices if STRATEGIES[strategy].many_devices else 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    @functools.cache
    def run(strategy: str) -> Path:
        task = Regression(kind="tokens", optimizer="adamw", layered=True)
        folder = tmp_path_factory.mktemp("runs")
        return train_case(folder, task, strategy, devices_of(strategy, 2), **SETTINGS)

    return run


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_run_begun_under_one_strategy_ends_under_another_with_the_same_weights(first, second, runs, tmp_path):
    run = back_to(runs(first), 56, tmp_path)
    resumed(run, strategy=second, nproc=devices_of(second, 3), microbatch_size=2)
    assert largest_difference(weights_of(run), weights_of(runs("single"))) < TO_ROUNDING
    assert list(samples_by_epoch(run)) == [list(range(44))] * 2
