"""Random numbers of a sample are the same wherever they are drawn; those of a rank can be repeated."""

import functools

import pytest
import torch

from tests.conformance.cases import (
    MANY_PAIRS,
    TO_ROUNDING,
    are_same_bits,
    crossed,
    is_layered,
    largest_difference,
    losses_of,
    train_case,
    weights_of,
)
from tests.conformance.tasks import Augmented, Regression

STEPS = {"global_batch_size": 7, "epochs": 2, "seed": 11}
WAYS = ("one by one", "subset", "batched")


@pytest.fixture(scope="module")
def augmented_alone(tmp_path_factory):
    @functools.cache
    def weights(way: str, layered: bool = False):
        return weights_of(train_case(tmp_path_factory.mktemp("one"), Augmented(way=way, layered=layered), **STEPS))

    return weights


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "num_devices", "way"), crossed(MANY_PAIRS, [(way,) for way in WAYS]))
def test_augmentation_is_the_same_on_any_number_of_devices(strategy, num_devices, way, augmented_alone, tmp_path):
    layered = is_layered(strategy)
    task = Augmented(way=way, layered=layered)
    run = train_case(tmp_path, task, strategy, num_devices, microbatch_size=2, **STEPS)
    assert largest_difference(weights_of(run), augmented_alone(way, layered)) < TO_ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_augmentation_is_the_same_with_loader_workers(way, augmented_alone, tmp_path):
    run = train_case(tmp_path, Augmented(way=way), "ddp", 2, num_workers=2, **STEPS)
    assert largest_difference(weights_of(run), augmented_alone(way)) < TO_ROUNDING


@pytest.mark.parametrize("way", WAYS)
def test_augmentation_differs_from_none_and_between_epochs(way, augmented_alone, trained, tmp_path):
    plain = weights_of(trained(Regression(), **STEPS))
    assert largest_difference(plain, augmented_alone(way)) > 1e-4
    # without shuffling, a learning rate of nothing: epochs differ by their draws alone
    run = train_case(tmp_path, Still(way=way), shuffle=False, **STEPS)
    losses = losses_of(run)
    assert losses[:7] != pytest.approx(losses[7:], rel=1e-6)


class Still(Augmented):
    """Learns nothing, so that a loss shows the batch alone."""

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.0)


@pytest.mark.slow
def test_a_deterministic_run_repeats_bit_by_bit_with_dropout(tmp_path):
    """Under every strategy, that a resumed run is bit-equal says as much."""
    task = Regression(dtype="float32", dropout=0.3, kind="tokens")
    settings = {"deterministic": True, "num_workers": 2, "microbatch_size": 2, **STEPS}
    first, second = [weights_of(train_case(tmp_path, task, "ddp", 2, **settings)) for _ in range(2)]
    assert are_same_bits(first, second)


def test_loader_workers_do_not_change_what_dropout_draws(tmp_path):
    task = Regression(dropout=0.3)
    without, with_two = [weights_of(train_case(tmp_path, task, num_workers=n, **STEPS)) for n in (0, 2)]
    assert are_same_bits(without, with_two)


def test_another_seed_gives_another_run(tmp_path):
    runs = [train_case(tmp_path, Regression(), **{**STEPS, "seed": seed}) for seed in (1, 2)]
    assert largest_difference(*(weights_of(run) for run in runs)) > 1e-3


@pytest.mark.slow
def test_ranks_draw_dropout_of_their_own(tmp_path):
    """With the same draws on both ranks, two equal halves would have equal losses."""
    run = train_case(tmp_path, Regression(dropout=0.5), "ddp", 2, **STEPS)
    alone = train_case(tmp_path, Regression(dropout=0.5), **STEPS)
    assert losses_of(run) != pytest.approx(losses_of(alone), rel=1e-9)
