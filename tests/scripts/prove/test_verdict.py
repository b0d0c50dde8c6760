"""Verdicts over made recordings: what counts as rounding, and what must not be hidden by it."""

from typing import Any

import torch
from torch import Tensor

from dure.scripts.prove.certificate import Certificate
from dure.scripts.prove.recording import Recording, Step
from dure.scripts.prove.verdict import judge


def certificate(precision: str) -> Certificate:
    return Certificate(script="train.py", arguments=[], nproc=2, precision=precision)


def step(gradients: dict[str, Tensor], weights: dict[str, Tensor], rate: float = 0.1) -> Step:
    return Step(
        optimizer=0, line="train.py:9", rates=[rate], losses=[1.0], loss_lines=["train.py:8"],
        gradients=gradients, weights=weights,
    )  # fmt: skip


def judged(precision: str, of_ranks: Step, of_one: Step) -> Any:
    ranks = [Recording(rank=rank, world_size=2, steps=[of_ranks], num_steps=1) for rank in range(2)]
    return judge(certificate(precision), ranks, Recording(rank=0, world_size=1, steps=[of_one], num_steps=1))


def test_weight_when_its_gradient_is_noise_then_it_hides_no_other_that_differs() -> None:
    gradients = {"bias": torch.full((4,), 1e-9), "weight": torch.ones(4)}
    weights = {"bias": torch.full((4,), 0.01), "weight": torch.ones(4)}
    noisy = {**weights, "bias": torch.full((4,), -0.01)}
    assert judged("float32", step(gradients, weights), step(gradients, noisy)).verdict == "equal"
    wrong = {**noisy, "weight": torch.full((4,), 1.01)}
    (cause,) = judged("float32", step(gradients, weights), step(gradients, wrong)).causes
    assert (cause.id, "change weight otherwise" in cause.what) == ("other_update", True)


def test_gradients_when_computed_in_float32_in_between_then_are_equal_with_a_note_and_other_causes_have_none() -> None:
    one = {"weight": torch.ones(4, dtype=torch.float64)}
    near = {"weight": torch.ones(4, dtype=torch.float64) + torch.tensor([1e-7, 0, 0, 0], dtype=torch.float64)}
    found = judged("float64", step(near, one), step(one, one))
    assert (found.verdict, len(found.notes)) == ("equal", 1)
    assert "computed in float32" in found.notes[0]
    found = judged("float64", step(one, one, rate=0.2), step(one, one))
    assert ([cause.id for cause in found.causes], found.notes) == (["scaled_learning_rate"], [])
    far = {"weight": one["weight"] * torch.tensor([1.0, 1.0, 1.0, 1.001])}
    assert judged("float64", step(far, one), step(one, one)).verdict == "differs"


def test_weights_when_in_half_precision_then_a_note_says_what_is_not_seen() -> None:
    half = {"weight": torch.ones(4, dtype=torch.bfloat16)}
    found = judged("float32", step(half, half), step(half, half))
    assert (found.verdict, found.tolerance) == ("equal", 0.05)
    assert "differences up to 5% count as rounding: smaller faults are not seen" in found.notes[0]
