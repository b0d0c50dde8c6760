"""Strategies of another trajectory: they learn, use every sample once, and agree when read."""

import pytest
import torch

import dure
from dure.strategies.table import STRATEGIES
from examples.digits import Digits
from tests.conformance.cases import (
    TO_ROUNDING,
    crossed,
    evaluated_digests,
    largest_difference,
    samples_by_epoch,
    train_case,
    weights_of,
)
from tests.conformance.tasks import Regression
from tests.conformance.test_resume import SETTINGS, back_to, resumed

pytestmark = pytest.mark.slow


INEXACT = [(name, 3) for name, info in STRATEGIES.items() if not info.is_exact]
ENOUGH = 0.95
"""Accuracy that is enough on the held-out digits, of which one process gets 98 to 99 % right."""


@pytest.mark.parametrize(("strategy", "num_devices"), INEXACT)
def test_digits_are_learned_in_the_usual_epochs_and_the_summary_says_what_is_not_preserved(
    strategy, num_devices, tmp_path
):
    summary = dure.train(
        Digits(), strategy=strategy, nproc=num_devices, runs_dir=tmp_path, quiet=True, start="fork", device="cpu",
        threads=1,
    )  # fmt: skip
    assert summary.epochs == Digits.defaults["epochs"]
    assert summary.metrics["accuracy"].value >= ENOUGH
    assert any("trajectory" in text for text in summary.not_preserved)


@pytest.mark.parametrize("strategy", [name for name, info in STRATEGIES.items() if not info.is_exact])
def test_row_says_in_words_that_the_trajectory_is_another(strategy):
    assert any("trajectory" in text for text in STRATEGIES[strategy].does_not_preserve)
    assert "weights after every step" not in STRATEGIES[strategy].preserves


@pytest.mark.parametrize(("strategy", "num_devices"), INEXACT)
def test_all_ranks_hold_equal_weights_whenever_they_are_read(strategy, num_devices, tmp_path):
    digests = tmp_path / "digests"
    digests.mkdir()
    task = Regression(digests=str(digests))
    settings = {"epochs": 3, "global_batch_size": 7, "eval_every_epochs": 0.5, "eval_batch_size": 4}
    train_case(tmp_path, task, strategy, num_devices, **settings)
    # 23 samples by 4 are six batches, two or three for each rank: all of one evaluation see the same weights
    num_evaluations = 3 * 2
    assert len(evaluated_digests(digests)) == num_evaluations
    assert len(list(digests.iterdir())) == num_devices


@pytest.mark.parametrize(("strategy", "num_devices", "settings"), crossed(INEXACT, [({"microbatch_size": 1},), ({},)]))
def test_every_sample_of_an_epoch_is_used_once_with_a_last_batch_smaller_than_the_ranks(
    strategy, num_devices, settings, tmp_path
):
    # 43 by 7: the last batch has one sample
    task = Regression(num_samples=43, kind="tokens")
    settings = {"epochs": 2, "global_batch_size": 7, "record_samples": True, **settings}
    run = train_case(tmp_path, task, strategy, num_devices, **settings)
    assert list(samples_by_epoch(run)) == [list(range(43))] * 2
    assert all(tensor.isfinite().all() for tensor in weights_of(run).values())


@pytest.mark.parametrize(("strategy", "num_devices"), INEXACT)
def test_evaluation_is_that_of_one_process_with_the_saved_weights(strategy, num_devices, tmp_path):
    task = Regression(kind="tokens")
    summary = dure.train(
        task, strategy=strategy, nproc=num_devices, runs_dir=tmp_path, quiet=True, start="fork", device="cpu",
        epochs=2, global_batch_size=7, threads=1,
    )  # fmt: skip
    alone = dure.evaluate(summary.run, which="last", nproc=1, start="fork")["metrics"]
    for name, metric in summary.metrics.items():
        assert alone[name]["count"] == metric.count
        assert alone[name]["value"] == pytest.approx(metric.value, rel=1e-12)


@pytest.mark.parametrize(("strategy", "num_devices", "optimizer"), crossed(INEXACT, [("sgd",), ("adamw",)]))
def test_a_checkpoint_means_the_same_to_every_exact_strategy(strategy, num_devices, optimizer, tmp_path):
    task = Regression(kind="tokens", optimizer=optimizer)
    whole = train_case(tmp_path, task, strategy, num_devices, **SETTINGS)
    ends = []
    for name, nproc in (("single", 1), ("ddp", 3)):
        run = resumed(back_to(whole, 58, tmp_path / name), strategy=name, nproc=nproc)
        assert list(samples_by_epoch(run)) == [list(range(44))] * 3
        ends.append(weights_of(run))
    assert largest_difference(*ends) < TO_ROUNDING


@pytest.mark.parametrize(("strategy", "num_devices"), INEXACT)
def test_a_run_goes_from_ddp_to_it_and_on_alone(strategy, num_devices, tmp_path):
    run = train_case(tmp_path, Digits(), "ddp", 2, epochs=3, eval_every_epochs=1)
    resumed(run, strategy=strategy, nproc=num_devices, epochs=8)
    summary = dure.train(resume=run, strategy="single", nproc=1, epochs=10, start="fork", quiet=True)
    assert summary.samples == 10 * 1442
    assert summary.metrics["accuracy"].value >= ENOUGH


class Frozen(Regression):
    """Learns nothing: what a checkpoint holds at the end is what the run was begun with."""

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.0)


@pytest.mark.parametrize(("strategy", "num_devices"), INEXACT)
def test_weights_that_nobody_moves_stay(strategy, num_devices, tmp_path):
    settings = {"epochs": 1, "global_batch_size": 7}
    one = weights_of(train_case(tmp_path, Frozen(), **settings))
    assert (
        largest_difference(weights_of(train_case(tmp_path, Frozen(), strategy, num_devices, **settings)), one) < 1e-14
    )
