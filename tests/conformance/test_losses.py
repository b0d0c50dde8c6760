"""The loss curve on real data in float32, and records that prove which samples were used."""

import pytest

from dure.strategies.table import STRATEGIES
from examples.digits import Digits
from tests.conformance.cases import (
    MANY_PAIRS,
    crossed,
    is_layered,
    losses_of,
    places,
    records_of,
    samples_by_epoch,
    train_case,
)
from tests.conformance.tasks import Regression

FLOAT32_CURVE = 1e-5
"""Sums of float32 in another order differ by 1e-7; forty steps of AdamW on digits amplify that to 1e-6."""

SETTINGS = {"samples": 40 * 64, "global_batch_size": 64, "seed": 3, "clip_norm": 1.0}


@pytest.fixture(scope="module")
def digits_alone(tmp_path_factory):
    return losses_of(train_case(tmp_path_factory.mktemp("one"), Digits(augment=True), **SETTINGS))


CURVES = [("dp", 3), ("ddp", 3), ("fsdp", 3), ("pipeline", 3)]
"""Ways to compute a step that differ: that all strategies have the same float64 weights says the rest."""


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "num_devices"), places(CURVES))
def test_loss_curve_on_digits_equals_one_process(strategy, num_devices, digits_alone, tmp_path):
    losses = losses_of(train_case(tmp_path, Digits(augment=True), strategy, num_devices, **SETTINGS))
    assert losses == pytest.approx(digits_alone, abs=FLOAT32_CURVE)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(("strategy", "num_devices"), [("single", 1), ("ddp", 3)])
def test_records_prove_that_every_sample_of_an_epoch_was_used_once(strategy, num_devices, tmp_path):
    """Resuming under any strategy proves it for the others."""
    settings = {"epochs": 2, "global_batch_size": 7, "microbatch_size": 1, "record_samples": True}
    run = train_case(tmp_path, Regression(), strategy, num_devices, **settings)
    assert list(samples_by_epoch(run)) == [list(range(44))] * 2


@pytest.mark.parametrize(("strategy", "num_devices", "kind"), crossed(MANY_PAIRS, [("mean",), ("tokens",)]))
def test_records_say_the_same_sums_on_every_rank_and_as_one_process(strategy, num_devices, kind, trained, tmp_path):
    task = Regression(kind=kind, layered=is_layered(strategy))
    one = records_of(trained(task, epochs=1, global_batch_size=10))
    run = train_case(tmp_path, task, strategy, num_devices, epochs=1, global_batch_size=10)
    num_ranks = 1 if STRATEGIES[strategy].one_process else num_devices
    for rank in range(num_ranks):
        ours = records_of(run, rank)
        for field in ("step", "epoch", "samples_seen", "loss_count"):
            assert [r[field] for r in ours] == [r[field] for r in one]
        assert [r["loss_sum"] for r in ours] == pytest.approx([r["loss_sum"] for r in one], rel=1e-12)


def test_dropping_the_last_batch_uses_whole_batches_only(tmp_path):
    run = train_case(
        tmp_path, Regression(), "ddp", 2, epochs=2, global_batch_size=10, drop_last=True, record_samples=True
    )
    assert [record["samples_seen"] for record in records_of(run)] == [10, 20, 30, 40, 50, 60, 70, 80]
    assert [len(set(samples)) for samples in samples_by_epoch(run)] == [40, 40]
