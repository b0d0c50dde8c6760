"""`dure diff`: two runs are the same, or it says where they part."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dure
from dure.api.diff import Difference, compare
from dure.cli import main
from dure.errors import RunInvalid
from dure.training.checkpoints.reader import Checkpoint
from tests.conformance.tasks import Regression
from tests.training.checkpoints.checkpoint_cases import flip_bit

STEPS = {"samples": 88, "global_batch_size": 11, "record_samples": True}
STEP = 6
"""Step at which one bit of a weight flips, in runs that use the same samples as the others."""
SMALL, LARGE = 20, 51
"""Bits of a float64's mantissa: flipped, they change it by about 1e-10, and by a third or a half of it."""


class Bent(Regression):
    """Task whose learning rate changes after some samples: the weights part first, the losses a step later."""

    bent_from: int = 0

    def build_schedule(self, optimizer, total_samples):
        return lambda samples: 0.5 if self.bent_from and samples >= self.bent_from else 1.0


def train(folder: Path, name: str, task: dure.Task, **settings) -> None:
    dure.train(
        task, runs_dir=folder, name=name, start="fork", threads=1, quiet=True, device="cpu", **(STEPS | settings)
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, settings in (
        ("one", {}),
        ("again", {}),
        ("two", {"strategy": "ddp", "nproc": 2}),
        ("seed", {"seed": 3}),
        ("longer", {"samples": 110, "record_samples": False}),
    ):
        train(folder, name, Regression(optimizer="adamw"), **settings)
    return folder


@pytest.fixture(scope="module")
def bent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give runs that use the same samples and part at a known place, with a checkpoint after every second step."""
    folder = tmp_path_factory.mktemp("bent")
    often = {"checkpoint": {"every_samples": 22, "keep": 8}}
    train(folder, "straight", Bent(), **often)
    train(folder, "last-step", Bent(bent_from=77), **often)
    for name, bit in (("small", SMALL), ("large", LARGE)):
        faults = folder / f"{name}.toml"
        faults.write_text(f'[[fault]]\nrank = 0\nstep = {STEP}\nkind = "flip"\nbit = {bit}\n')
        train(folder, name, Bent(), faults=faults, **often)
    return folder


def told(capsys: pytest.CaptureFixture[str], folder: Path, one: str, other: str, *more: str) -> tuple[int, str]:
    code = main(["diff", str(folder / one), str(folder / other), *more])
    return code, capsys.readouterr().out


@pytest.mark.slow
def test_runs_when_repeated_then_they_are_the_same_bit_by_bit(runs, capsys):
    assert main(["diff", str(runs / "one"), str(runs / "again")]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "steps     8 in both",
        "samples   the same in every step",
        "losses    the same, bit by bit",
        "weights   compared at the 2 positions at which both have a checkpoint",
        "          after 44 samples: the same, bit by bit",
        "          after 88 samples: the same, bit by bit",
    ]


def test_runs_when_divided_otherwise_then_they_are_the_same_up_to_rounding(runs, capsys):
    words = ["diff", str(runs / "one"), str(runs / "two")]
    assert main([*words, "--tolerance", "1e-12"]) == 0
    assert "nproc: 1 | 2" in capsys.readouterr().out
    found = compare(runs / "one", runs / "two")
    one, two = (load_file(runs / name / "weights.safetensors") for name in exported(runs, "one", "two"))
    largest = max((one[name] - two[name]).abs().max().item() for name in one)
    assert found.weights[-1].largest <= largest < 1e-12
    assert all(weights.relative < 1e-12 for weights in found.weights)
    assert found.samples_from is None


def exported(runs, *names):
    for name in names:
        dure.export(runs / name, runs / name / "weights.safetensors")
    return names


def test_runs_when_of_other_seeds_then_the_first_step_is_named(runs, capsys):
    assert main(["diff", str(runs / "one"), str(runs / "seed"), "--json"]) == 4
    found = json.loads(capsys.readouterr().out)
    assert found["part_at"] == "other samples from step 1 on"
    assert found["settings"] == {"seed": [0, 3]}
    assert found["losses"]["step"] == 1
    assert all(weights["relative"] > 1e-3 for weights in found["weights"])


def test_runs_when_one_is_longer_and_did_not_record_samples_then_what_both_have_is_compared(runs):
    found = compare(runs / "one", runs / "longer")
    assert (found.steps, found.steps_of_one) == (8, (0, 2))
    assert not found.has_samples
    assert found.samples_from is None


def test_runs_when_they_have_nothing_in_common_then_that_is_no_sameness(runs, tmp_path, capsys):
    shutil.copytree(runs / "one", tmp_path / "before-its-first-step")
    (tmp_path / "before-its-first-step/rank0.jsonl").write_text("")
    shutil.rmtree(tmp_path / "before-its-first-step/checkpoints")
    assert main(["diff", str(runs / "one"), str(tmp_path / "before-its-first-step")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "have nothing in common to compare" in said.err


def test_runs_when_they_have_checkpoints_but_no_step_in_common_then_only_weights_are_compared(runs, tmp_path, capsys):
    shutil.copytree(runs / "one", tmp_path / "without-records")
    (tmp_path / "without-records/rank0.jsonl").write_text("")
    assert main(["diff", str(runs / "one"), str(tmp_path / "without-records")]) == 0
    said = capsys.readouterr().out
    assert "samples   not compared, nor are losses: no step that both have on record\nweights   compared at" in said
    assert "bit by bit" in said
    assert "losses    " not in said


@pytest.mark.parametrize(("name", "more"), [("small", ()), ("large", ()), ("large", ("--tolerance", "1e-6"))])
def test_losses_when_they_part_at_a_step_then_it_is_named_and_so_is_where_the_weights_do(bent, capsys, name, more):
    code, text = told(capsys, bent, "straight", name, *more)
    assert code == 4
    assert f"losses    first differ at step {STEP}: " in text
    assert "samples   the same in every step" in text
    same = "the same, bit by bit"
    assert f"after 22 samples: {same}\n          after 44 samples: {same}\n{found_line(bent, name, 66)}\n" in text
    assert "they part between 44 samples (step 4) and 66 samples (step 6)" in text
    found = compare(bent / "straight", bent / name)
    assert (found.samples_from, found.losses.step) == (None, STEP)
    assert found.part_at == f"other losses from step {STEP} on"
    assert found.weights_part == (44, 66)


def test_losses_when_they_part_inside_the_tolerance_then_the_runs_are_the_same(bent, capsys):
    code, text = told(capsys, bent, "straight", "small", "--tolerance", "1e-6")
    assert code == 0
    assert "losses    the same up to 1e-06" in text
    assert "they part" not in text
    found = compare(bent / "straight", bent / "small", tolerance=1e-6)
    assert (found.losses, found.part_at, found.weights_part) == (None, None, None)
    assert 0 < found.weights[-1].relative < 1e-6


def test_weights_when_they_part_after_the_last_loss_then_the_checkpoint_is_named(bent, capsys):
    code, text = told(capsys, bent, "straight", "last-step", "--json")
    found = json.loads(text)
    assert code == 4
    assert found["losses"] is None
    assert found["part_at"] == "other weights after 88 samples, where those after 66 are the same"
    assert found["weights_part"] == [66, 88]


def test_checkpoints_when_there_are_many_then_those_around_the_parting_are_shown(bent, capsys, monkeypatch):
    monkeypatch.setattr("dure.cli.judging.diff.MOST_WEIGHTS", 2)
    assert (
        told(capsys, bent, "straight", "large")[1].splitlines()[-5:]
        == [
            "weights   compared at the 4 positions at which both have a checkpoint",
            "          (1 before, the same too)",
            "          after 44 samples: the same, bit by bit",
            found_line(bent, "large", 66),
            "          (1 behind)",
            "          they part between 44 samples (step 4) and 66 samples (step 6)",
        ][-5:]
    )


def found_line(bent: Path, name: str, samples: int) -> str:
    (one,) = [one for one in compare(bent / "straight", bent / name).weights if one.samples_seen == samples]
    return (
        f"          after {samples} samples: {one.tensor} differs most, by up to {one.largest:.1e} "
        f"({one.relative:.1e} of its largest element)"
    )


@pytest.mark.parametrize("is_told", [True, False], ids=["one is whole", "none is whole"])
def test_checkpoint_when_it_is_damaged_then_it_is_named_and_the_rest_compared(runs, capsys, tmp_path, is_told):
    shutil.copytree(runs / "again", tmp_path / "again")
    names = ["samples-000000000088"] if is_told else ["samples-000000000044", "samples-000000000088"]
    for name in names:
        flip_bit(tmp_path / "again/checkpoints" / name / "model.safetensors", 4000)
    code = main(["diff", str(runs / "one"), str(tmp_path / "again")])
    text = capsys.readouterr().out
    assert code == 0
    for name in names:
        assert f"{tmp_path / 'again'}: checkpoint {name} is damaged: model.safetensors " in text
    if is_told:
        assert "compared at the 1 position at which both have a whole checkpoint" in text
    else:
        assert "weights   not compared: no whole checkpoint at a position that both have" in text
    damaged = compare(runs / "one", tmp_path / "again").damaged
    assert [(one.run, one.checkpoint) for one in damaged] == [(str(tmp_path / "again"), name) for name in names]


ZERO, NAN = 0.0, math.nan
OTHER_NAN = torch.tensor([0x7FF8000000000001]).view(torch.float64).item()


@pytest.mark.parametrize(
    ("one", "other", "tolerance", "is_same"),
    [
        ([1.0, ZERO], [1.0, -ZERO], 0.0, False),
        ([1.0, ZERO], [1.0, -ZERO], 1e-6, True),
        ([1.0, NAN], [1.0, NAN], 0.0, True),
        ([1.0, NAN], [1.0, NAN], 1e-6, True),
        ([1.0, NAN], [1.0 + 1e-9, NAN], 1e-6, True),
        ([1.0, NAN], [1.0 + 1e-3, NAN], 1e-6, False),
        ([1.0, NAN], [1.0, OTHER_NAN], 0.0, False),
        ([1.0, NAN], [1.0, OTHER_NAN], 1e-6, True),
        ([1.0, NAN], [NAN, 1.0], 1e-6, False),
        ([1.0, math.inf], [1.0 + 1e-9, math.inf], 1e-6, True),
        ([1.0, math.inf], [1.0, -math.inf], 0.5, False),
        ([1.0, math.inf], [1.0, 2.0], 0.5, False),
    ],
)
def test_weights_when_they_are_zero_or_not_finite_then_are_compared_by_bits_or_by_place(
    runs, monkeypatch, one, other, tolerance, is_same
):
    found = with_weights(monkeypatch, runs, one, other, tolerance)
    assert (found.part_at is None) == is_same
    assert found.weights[-1].num_nan == (math.isnan(one[1]) and math.isnan(other[1]))


def with_weights(monkeypatch, runs: Path, one: object, other: object, tolerance: float) -> Difference:
    """Compare two runs as if their checkpoints held one tensor each."""
    values = iter([one, other] * 2)
    monkeypatch.setattr(
        Checkpoint, "weights", lambda checkpoint: {"w": torch.tensor(next(values), dtype=torch.float64)}
    )
    return compare(runs / "one", runs / "again", tolerance=tolerance)


def test_weights_when_nan_is_at_the_same_places_then_that_is_said(runs, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "weights", lambda checkpoint: {"w": torch.tensor([1.0, NAN, NAN])})
        assert main(["diff", str(runs / "one"), str(runs / "again"), "--tolerance", "1e-6"]) == 0
    assert "after 44 samples: the same, bit by bit (2 elements are NaN in both)" in capsys.readouterr().out


def test_weights_when_only_the_sign_of_a_zero_differs_then_the_bits_are_said_to(runs, monkeypatch, capsys):
    values = iter([[1.0, ZERO], [1.0, -ZERO]] * 2)
    with monkeypatch.context() as patched:
        patched.setattr(Checkpoint, "weights", lambda checkpoint: {"w": torch.tensor(next(values))})
        assert main(["diff", str(runs / "one"), str(runs / "again")]) == 4
    assert "after 44 samples: w differs in bits, not in values" in capsys.readouterr().out


def test_weights_when_of_complex_numbers_then_their_imaginary_parts_count(runs, monkeypatch):
    values = iter([1 + 1j, 1 + 2j] * 2)
    monkeypatch.setattr(Checkpoint, "weights", lambda checkpoint: {"w": torch.tensor([next(values)])})
    assert compare(runs / "one", runs / "again").weights[0].largest == 1.0


def test_runs_when_there_is_none_or_the_tolerance_is_none_then_one_sentence_says_so(runs, capsys):
    with pytest.raises(RunInvalid, match="does not exist"):
        compare(runs / "one", runs / "none")
    assert main(["diff", str(runs / "one"), str(runs / "again"), "--tolerance", "2"]) == 2
    assert "tolerance is 2 but must be a number of at least 0 and below 1" in capsys.readouterr().err
