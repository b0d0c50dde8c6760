"""A run that is taken up again ends with the weights of the undisturbed one."""

import functools
import json
import math
import shutil
from pathlib import Path

import pytest

import dure
from tests.conformance.cases import (
    ALWAYS,
    TELLING,
    TELLING_PAIRS,
    TO_ROUNDING,
    are_same_bits,
    crossed,
    is_layered,
    largest_difference,
    losses_of,
    samples_by_epoch,
    train_case,
    weights_of,
)
from tests.conformance.tasks import Augmented, Normalised, Regression
from tests.specs import grouped

# checkpoints in the middle of epochs of 44 samples, at 14, 28, 44 (the end of the first), 58, ...
SETTINGS = {
    "global_batch_size": 7, "epochs": 3, "seed": 2, "clip_norm": 0.4,
    "checkpoint": {"every_samples": 14, "keep": 99}, "record_samples": True,
}  # fmt: skip


def back_to(run: Path, samples: int, folder: Path) -> Path:
    """Copy a finished run as it was when killed some time after its checkpoint at `samples`."""
    copy = folder / f"{run.name}-{samples}"
    shutil.copytree(run, copy)
    later = [path for path in (copy / "checkpoints").glob("samples-*") if int(path.name.split("-")[1]) > samples]
    assert later
    for path in later:
        shutil.rmtree(path)
    return copy


def resumed(run: Path, **settings) -> Path:
    """Take up a run; options of a strategy that is named stand among the settings."""
    dure.train(resume=run, start="fork", quiet=True, **grouped(settings.get("strategy"), settings))
    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    @functools.cache
    def run(strategy: str, num_devices: int, kind: str, optimizer: str, layered: bool) -> Path:
        task = Augmented(way="one by one", kind=kind, optimizer=optimizer, layered=layered)
        return train_case(tmp_path_factory.mktemp("runs"), task, strategy, num_devices, **SETTINGS)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "num_devices", "kind", "optimizer", "samples"),
    crossed(
        [pair for pair in TELLING_PAIRS if pair[0] in ALWAYS],  # test_pairs.py resumes under all
        [("tokens", "adamw", 58), ("mean", "sgd", 44)],
    ),
)
def test_resume_under_another_strategy_ends_with_the_same_weights(
    strategy, num_devices, kind, optimizer, samples, undisturbed, tmp_path
):
    whole = undisturbed("ddp", 3, kind, optimizer, is_layered(strategy))
    run = back_to(whole, samples, tmp_path)
    resumed(run, strategy=strategy, nproc=num_devices, microbatch_size=2)
    assert largest_difference(weights_of(run), weights_of(whole)) < TO_ROUNDING
    assert list(samples_by_epoch(run)) == [list(range(44))] * 3
    assert losses_of(run) == pytest.approx(losses_of(whole), rel=1e-9)


@pytest.mark.parametrize(("strategy", "num_devices"), TELLING)
def test_resume_in_the_same_place_is_bit_equal_with_dropout(strategy, num_devices, tmp_path):
    task = Regression(dtype="float32", dropout=0.3, kind="tokens", optimizer="adamw", layered=is_layered(strategy))
    settings = {**SETTINGS, "checkpoint": {"every_samples": 28, "keep": 99}}
    whole = train_case(tmp_path, task, strategy, num_devices, deterministic=True, **settings)
    run = resumed(back_to(whole, 72, tmp_path))
    assert are_same_bits(weights_of(run), weights_of(whole))
    assert losses_of(run) == losses_of(whole)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"bucket_bytes": 100}, {"find_unused_parameters": True}], ids=repr)
def test_resume_on_three_ranks_is_bit_equal_however_gradients_are_bucketed(settings, tmp_path):
    """On three ranks a gradient's place in its bucket decides in which order the ranks' values are added."""
    whole = train_case(tmp_path, Regression(dtype="float32"), "ddp", 3, **settings, **SETTINGS)
    run = resumed(back_to(whole, 28, tmp_path))
    assert are_same_bits(weights_of(run), weights_of(whole))


@pytest.mark.slow
def test_resume_with_batchnorm_and_loader_workers_is_bit_equal(tmp_path):
    task = Normalised(dtype="float32", dropout=0.3)
    whole = train_case(tmp_path, task, "ddp", 2, num_workers=2, **SETTINGS)
    run = resumed(back_to(whole, 58, tmp_path))
    assert are_same_bits(weights_of(run), weights_of(whole))


@pytest.mark.slow
def test_resume_in_fp16_carries_the_scale_of_the_loss(tmp_path):
    task = Regression(dtype="float32", kind="tokens")
    whole = train_case(tmp_path, task, "ddp", 2, precision="fp16", **SETTINGS)
    run = resumed(back_to(whole, 58, tmp_path))
    assert are_same_bits(weights_of(run), weights_of(whole))


@pytest.mark.slow
def test_a_run_may_grow_and_is_then_the_longer_run(tmp_path):
    constant = {**SETTINGS, "samples": 44}
    del constant["epochs"]
    short = train_case(tmp_path, Unscheduled(), "ddp", 2, **constant)
    resumed(short, epochs=3, strategy="single", nproc=1)
    whole = train_case(tmp_path, Unscheduled(), **SETTINGS)
    assert largest_difference(weights_of(short), weights_of(whole)) < TO_ROUNDING


def declared_of(run: Path) -> list[str]:
    return json.loads((run / "summary.json").read_text())["not_preserved"]


@pytest.mark.parametrize(
    ("samples", "said"),
    [(44, []), (30, ["batches: the run had an end at 30 samples, after a batch of 2; "])],
)
def test_run_when_it_grows_then_what_its_first_end_changed_is_declared(samples, said, tmp_path):
    settings = {**SETTINGS, "samples": samples}
    del settings["epochs"]
    short = train_case(tmp_path, Unscheduled(), "single", 1, **settings)
    assert not declared_of(short)
    resumed(short, samples=None, epochs=3)
    resumed(short)  # what was done stays declared
    declared = declared_of(short)
    assert len(declared) == len(said)
    assert all(text.startswith(start) for text, start in zip(declared, said, strict=True))


class Warmed(Regression):
    """Task whose learning rate rises over a number of samples, whatever the length of the run."""

    def build_schedule(self, optimizer, total_samples):
        return lambda samples_seen: min(1.0, (1 + samples_seen) / 20)


class Cosine(Regression):
    """Task whose learning rate falls to zero at the end of the run."""

    def build_schedule(self, optimizer, total_samples):
        return lambda samples_seen: 0.5 * (1 + math.cos(math.pi * samples_seen / total_samples))


@pytest.mark.parametrize(("task", "strategy"), [(Warmed, "single"), (Cosine, "single"), (Cosine, "fsdp")])
def test_run_when_it_grows_then_a_schedule_over_its_first_length_is_declared(task, strategy, tmp_path):
    settings = {**SETTINGS, "samples": 44}
    del settings["epochs"]
    short = train_case(tmp_path, task(), strategy, 1 if strategy == "single" else 2, **settings)
    resumed(short, samples=None, epochs=3)
    said = "learning rate: in earlier attempts that of a schedule over another length; "
    assert [text[: len(said)] for text in declared_of(short)] == [said] * (task is Cosine)
    resumed(short)
    assert len(declared_of(short)) == (task is Cosine)


class Unscheduled(Regression):
    """Task whose learning rate does not know how long the run is."""

    def build_schedule(self, optimizer, total_samples):
        return None
