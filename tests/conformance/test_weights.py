"""The contract's heart: after k steps the weights are those of one process, on any number of devices."""

import functools
from pathlib import Path

import pytest
import torch

from dure.training.seeds import seed_everything
from dure.training.session.sample_order import SampleOrder
from tests.conformance.cases import (
    PAIRS,
    TELLING,
    TO_ROUNDING,
    crossed,
    evaluated_digests,
    is_layered,
    largest_difference,
    records_of,
    train_case,
    weights_of,
)
from tests.conformance.tasks import Regression

# 44 samples by 7: six whole batches that two and three devices cannot share evenly, and one of two samples, fewer
# than three devices. 130 samples are 20 steps: two epochs and six steps of the third.
STEPS = {"global_batch_size": 7, "samples": 130, "clip_norm": 0.4, "seed": 5}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Return the weights of the one-process run without accumulation, made once for each task."""

    @functools.cache
    def weights(kind: str, optimizer: str, layered: bool = False):
        folder: Path = tmp_path_factory.mktemp("one")
        return weights_of(train_case(folder, Regression(kind=kind, optimizer=optimizer, layered=layered), **STEPS))

    return weights


EVERY_PAIR = [("mean", "sgd", None), ("mean", "adamw", 2), ("tokens", "sgd", 2), ("tokens", "adamw", None)]
"""Loss, optimiser and microbatch: of the eight ways to choose the four in which every two choices meet."""


@pytest.mark.parametrize(
    ("strategy", "num_devices", "kind", "optimizer", "microbatch_size"), crossed(PAIRS, EVERY_PAIR)
)
def test_weights_after_20_steps_equal_one_process(
    strategy, num_devices, kind, optimizer, microbatch_size, one_process, tmp_path
):
    digests = tmp_path / "digests"
    digests.mkdir()
    layered = is_layered(strategy)
    task = Regression(kind=kind, optimizer=optimizer, layered=layered, digests=str(digests))
    run = train_case(tmp_path, task, strategy, num_devices, microbatch_size=microbatch_size, **STEPS)
    assert largest_difference(weights_of(run), one_process(kind, optimizer, layered)) < TO_ROUNDING
    assert len(evaluated_digests(digests)) == 1


@pytest.mark.parametrize("strategy", [name for name, num_devices in PAIRS if num_devices == 3])
def test_weights_of_every_strategy_on_three_devices_equal_one_process(strategy, one_process, tmp_path):
    """The heart of the battery, every time."""
    task = Regression(kind="tokens", optimizer="adamw", layered=is_layered(strategy))
    run = train_case(tmp_path, task, strategy, 3, microbatch_size=2, **STEPS)
    assert largest_difference(weights_of(run), one_process("tokens", "adamw", is_layered(strategy))) < TO_ROUNDING


@pytest.mark.parametrize(("strategy", "num_devices"), TELLING)
def test_weights_with_a_last_batch_of_one_sample_equal_one_process(strategy, num_devices, trained, tmp_path):
    task = Regression(kind="tokens", optimizer="adamw", num_samples=41, layered=is_layered(strategy))
    steps = {"global_batch_size": 10, "epochs": 4, "seed": 9}
    one = weights_of(trained(task, **steps))
    run = train_case(tmp_path, task, strategy, num_devices, microbatch_size=3, **steps)
    assert len(records_of(run)) == 20
    assert largest_difference(weights_of(run), one) < TO_ROUNDING


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_weights_under_any_share_of_the_first_device_equal_one_process(share, one_process, tmp_path):
    run = train_case(tmp_path, Regression(kind="tokens"), "balanced_dp", 3, device0_share=share, **STEPS)
    assert largest_difference(weights_of(run), one_process("tokens", "sgd")) < TO_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"bucket_bytes": 64}, {"gradient_as_bucket_view": False}, {"start": "spawn"}],
    ids=repr,
)
def test_weights_under_any_setting_of_ddp_equal_one_process(settings, one_process, tmp_path):
    run = train_case(tmp_path, Regression(kind="tokens"), "ddp", 2, microbatch_size=2, **settings, **STEPS)
    assert largest_difference(weights_of(run), one_process("tokens", "sgd")) < TO_ROUNDING


@pytest.mark.parametrize("kind", ["mean", "tokens"])
def test_one_process_by_the_strategy_equals_a_loop_written_by_hand(kind, one_process):
    assert largest_difference(one_process(kind, "sgd"), by_hand(Regression(kind=kind))) < TO_ROUNDING


def by_hand(task):
    """Train as one writes it without dure: the loss of the whole batch, one backward, clip, step."""
    seed_everything(STEPS["seed"])
    model = task.build_model()
    optimizer = task.build_optimizer(model)
    schedule = task.build_schedule(optimizer, STEPS["samples"])
    order = SampleOrder(task.num_samples, STEPS["global_batch_size"], seed=STEPS["seed"])
    data = task.train_data()
    for batch in order.batches(0, STEPS["samples"]):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * schedule(batch.samples_seen - len(batch.indices))
        loss = task.loss(model, data.__getitems__(batch.indices))
        loss = loss if isinstance(loss, torch.Tensor) else loss.total / loss.count
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), STEPS["clip_norm"])
        optimizer.step()
    return model.state_dict()
