"""Pipelines in every schedule, alone and beside each other, end with the weights of one process."""

import functools
from itertools import cycle

import pytest

from tests.conformance.cases import (
    TO_ROUNDING,
    evaluated_digests,
    largest_difference,
    losses_of,
    records_of,
    samples_by_epoch,
    train_case,
    weights_of,
)
from tests.conformance.tasks import Normalised, Regression
from tests.conformance.test_resume import back_to, resumed

pytestmark = pytest.mark.slow


# as in test_weights: batches of 7 that cannot be shared evenly, short ones of two, 20 steps
STEPS = {"global_batch_size": 7, "samples": 130, "clip_norm": 0.4, "seed": 5}
LAYOUTS = [
    (2, {"schedule": "gpipe"}),
    (3, {"schedule": "gpipe"}),
    (3, {"schedule": "1f1b"}),
    (2, {"schedule": "interleaved"}),
    (2, {"schedule": "interleaved", "stages_per_rank": 4}),
    (3, {"schedule": "interleaved"}),
    (2, {"cuts": "1"}),
    (3, {"cuts": "3,4"}),  # a stage of nothing but dropout
    (4, {"mesh": "data=2,pipeline=2"}),
    (4, {"mesh": "data=2,pipeline=2", "schedule": "gpipe"}),
    (4, {"mesh": "data=2,pipeline=2", "schedule": "interleaved"}),
    (3, {"mesh": "data=3"}),
]
KINDS = cycle([("mean", None), ("tokens", 2)])


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    @functools.cache
    def weights(kind: str):
        return weights_of(train_case(tmp_path_factory.mktemp("one"), Regression(kind=kind, layered=True), **STEPS))

    return weights


@pytest.mark.parametrize(
    ("nproc", "layout", "kind", "microbatch_size"), [(*layout, *next(KINDS)) for layout in LAYOUTS], ids=str
)
def test_weights_of_any_layout_equal_one_process(nproc, layout, kind, microbatch_size, one_process, tmp_path):
    task = Regression(kind=kind, layered=True)
    run = train_case(tmp_path, task, "pipeline", nproc, microbatch_size=microbatch_size, **layout, **STEPS)
    assert largest_difference(weights_of(run), one_process(kind)) < TO_ROUNDING
    assert all(0 <= record["measured"]["bubble_fraction"] < 1 for record in records_of(run, nproc - 1))


def test_replicas_of_a_stage_hold_the_same_bits(tmp_path):
    digests = tmp_path / "digests"
    digests.mkdir()
    task = Regression(kind="tokens", layered=True, digests=str(digests))
    train_case(tmp_path, task, "pipeline", 4, mesh="data=2,pipeline=2", microbatch_size=1, **STEPS)
    assert len(list(digests.iterdir())) == 4
    assert len(evaluated_digests(digests)) == 1


def test_microbatches_of_no_sample_are_not_computed(tmp_path):
    """1F1B on three ranks has at least three microbatches, and BatchNorm would count one of zeros."""
    task = Normalised(num_samples=44)
    steps = {"global_batch_size": 7, "epochs": 2, "seed": 4, "microbatch_size": 4}
    one = weights_of(train_case(tmp_path, task, **steps))
    many = weights_of(train_case(tmp_path, task, "pipeline", 3, **steps))
    assert any(name.endswith("running_var") for name in many)
    assert largest_difference(many, one) < TO_ROUNDING


RESUMED = {
    "global_batch_size": 7, "epochs": 3, "seed": 2, "clip_norm": 0.4,
    "checkpoint": {"every_samples": 14, "keep": 99}, "record_samples": True,
}  # fmt: skip
HYBRID = {"nproc": 4, "strategy": "pipeline", "mesh": "data=2,pipeline=2"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    task = Regression(kind="tokens", optimizer="adamw", layered=True)
    return train_case(tmp_path_factory.mktemp("runs"), task, **{**RESUMED, **HYBRID})


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "single", "nproc": 1},
        {"strategy": "pipeline", "nproc": 3, "schedule": "interleaved"},
    ],
    ids=str,
)
def test_a_run_of_pipelines_side_by_side_goes_on_elsewhere_with_the_same_weights(settings, undisturbed, tmp_path):
    run = resumed(back_to(undisturbed, 58, tmp_path), microbatch_size=2, **settings)
    assert largest_difference(weights_of(run), weights_of(undisturbed)) < TO_ROUNDING
    assert list(samples_by_epoch(run)) == [list(range(44))] * 3
    assert losses_of(run) == pytest.approx(losses_of(undisturbed), rel=1e-9)


def test_a_run_of_ddp_goes_on_as_pipelines_side_by_side(undisturbed, tmp_path):
    task = Regression(kind="tokens", optimizer="adamw", layered=True)
    run = back_to(train_case(tmp_path, task, "ddp", 3, **RESUMED), 58, tmp_path)
    assert largest_difference(weights_of(resumed(run, **HYBRID)), weights_of(undisturbed)) < TO_ROUNDING
