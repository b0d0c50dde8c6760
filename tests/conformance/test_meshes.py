"""Meshes with an axis `tensor`: ranks with the same samples divide layers, of which others have shards or stages."""

from itertools import cycle

import pytest

from tests.conformance.cases import (
    TO_ROUNDING,
    are_same_bits,
    evaluated_digests,
    largest_difference,
    losses_of,
    train_case,
    weights_of,
)
from tests.conformance.tasks import Regression
from tests.conformance.test_resume import SETTINGS, back_to, resumed

STEPS = {"global_batch_size": 7, "samples": 58, "clip_norm": 0.05, "seed": 5}
SHARDS, STAGES = {"mesh": "shard=2,tensor=2"}, {"mesh": "pipeline=2,tensor=2"}
MESHES = [("fsdp", SHARDS["mesh"]), ("pipeline", STAGES["mesh"])]
ALL_ROWS = {"tensor_plan": "0=row,2=row,5=row,7=row"}
OTHERS = [
    ("fsdp", 4, {"mesh": "replica=2,tensor=2", "reshard_after_forward": False, "units": "2,5"}),
    ("fsdp", 4, {"mesh": "tensor=2,shard=2", "units": "*", "activation_checkpointing": True}),
    ("fsdp", 6, {"mesh": "shard=3,tensor=2", "units": "*", "prefetch": 2}),
    ("fsdp", 6, {"mesh": "shard=2,tensor=3", **ALL_ROWS}),
    ("fsdp", 6, {"mesh": "replica=3,shard=1,tensor=2", "backend": "gloo"}),
    ("fsdp", 2, {"mesh": "tensor=2"}),
    ("pipeline", 4, {"mesh": "tensor=2,pipeline=2", "schedule": "gpipe", **ALL_ROWS}),
    ("pipeline", 4, {**STAGES, "schedule": "interleaved"}),
    ("pipeline", 4, {"mesh": "data=2,tensor=2"}),
    ("pipeline", 2, {"mesh": "tensor=2"}),
    ("pipeline", 6, {"mesh": "pipeline=2,tensor=3", "cuts": "1", "tensor_plan": "0=column,2=row,5=column,7=row"}),
    ("pipeline", 6, {"mesh": "pipeline=3,tensor=2"}),
    ("pipeline", 8, {"mesh": "data=2,pipeline=2,tensor=2"}),
]
OPTIMIZERS = cycle(("adamw", "sgd"))


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "settings", "optimizer"),
    [
        # a wrong norm shows under SGD, for AdamW's step does not depend on the scale of gradients
        ("fsdp", 4, SHARDS, "sgd"),
        ("pipeline", 4, STAGES, "sgd"),
        *(pytest.param(*case, next(OPTIMIZERS), marks=pytest.mark.slow) for case in OTHERS),
    ],
    ids=repr,
)
def test_weights_under_any_mesh_equal_one_process(strategy, num_ranks, settings, optimizer, trained, tmp_path):
    digests = tmp_path / "digests"
    digests.mkdir()
    one = weights_of(trained(Regression(kind="tokens", optimizer=optimizer, layered=True), **STEPS))
    task = Regression(kind="tokens", optimizer=optimizer, layered=True, digests=str(digests))
    run = train_case(tmp_path, task, strategy, num_ranks, microbatch_size=1, **settings, **STEPS)
    assert largest_difference(weights_of(run), one) < TO_ROUNDING
    assert len(list(digests.iterdir())) == num_ranks
    assert len(evaluated_digests(digests)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "num_saved", "mesh", "elsewhere", "num_elsewhere", "other_mesh"),
    [
        ("fsdp", 4, "shard=2,tensor=2", "single", 1, None),
        ("fsdp", 6, "shard=3,tensor=2", "tensor_parallel", 3, None),
        ("fsdp", 3, None, "fsdp", 4, "shard=2,tensor=2"),
        ("tensor_parallel", 2, None, "fsdp", 4, "shard=2,tensor=2"),
        ("pipeline", 4, "pipeline=2,tensor=2", "single", 1, None),
        ("pipeline", 4, "pipeline=2,tensor=2", "fsdp", 3, None),
        ("tensor_parallel", 2, None, "pipeline", 4, "pipeline=2,tensor=2"),
        ("pipeline", 4, "data=2,pipeline=2", "pipeline", 4, "pipeline=2,tensor=2"),
    ],
)
def test_resume_elsewhere_ends_with_the_same_weights(
    saved, num_saved, mesh, elsewhere, num_elsewhere, other_mesh, trained, tmp_path
):
    task = Regression(kind="tokens", optimizer="adamw", layered=True)
    whole = trained(task, saved, num_saved, mesh=mesh, **SETTINGS)
    run = back_to(whole, 58, tmp_path)
    resumed(run, strategy=elsewhere, nproc=num_elsewhere, mesh=other_mesh)
    assert largest_difference(weights_of(run), weights_of(whole)) < TO_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "mesh"), MESHES)
def test_resume_in_the_same_place_is_bit_equal_with_dropout(strategy, mesh, tmp_path):
    task = Regression(dtype="float32", dropout=0.3, kind="tokens", optimizer="adamw", layered=True)
    whole = train_case(tmp_path, task, strategy, 4, mesh=mesh, deterministic=True, **SETTINGS)
    run = resumed(back_to(whole, 58, tmp_path))
    assert are_same_bits(weights_of(run), weights_of(whole))
    assert losses_of(run) == losses_of(whole)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "mesh"), MESHES)
def test_run_when_a_rank_is_killed_then_its_weights_are_those_of_one_process(strategy, mesh, trained, tmp_path):
    task = Regression(kind="tokens", optimizer="adamw", layered=True)
    faults = tmp_path / "faults.toml"
    faults.write_text('[[fault]]\nrank = 3\nstep = 6\nkind = "kill"\n')
    settings = {"mesh": mesh, "faults": faults, "max_restarts": 1, "snapshot_every": 1}
    run = train_case(tmp_path, task, strategy, 4, **settings, **STEPS)
    assert largest_difference(weights_of(run), weights_of(trained(task, **STEPS))) < TO_ROUNDING
