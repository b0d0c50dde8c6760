"""`dure diff`: two runs are the same, or it says where they part."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import dure
from dure.cli import main
from dure.difference import compare
from dure.errors import RunInvalid
from tests.conformance.tasks import Regression

STEPS = {"samples": 88, "global_batch_size": 11, "record_samples": True}


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
        dure.train(
            Regression(optimizer="adamw"), runs_dir=folder, name=name, start="fork", threads=1, quiet=True,
            device="cpu", **(STEPS | settings),
        )  # fmt: skip
    return folder


def test_runs_when_repeated_then_they_are_the_same_bit_by_bit(runs, capsys):
    assert main(["diff", str(runs / "one"), str(runs / "again")]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told == [
        "steps     8 in both",
        "samples   the same in every step",
        "losses    the same, bit by bit",
        "weights   after 44 samples: the same, bit by bit",
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


def test_weights_when_an_element_is_changed_then_its_tensor_is_named(runs, tmp_path, monkeypatch):
    from dure.training.checkpoint import Checkpoint

    read, seen = Checkpoint.weights, []

    def changed(checkpoint):
        weights = read(checkpoint)
        seen.append(checkpoint)
        if len(seen) == 4:
            name = max(weights)
            weights[name] = weights[name].clone()
            weights[name].view(-1)[0] += 0.5
        return weights

    monkeypatch.setattr(Checkpoint, "weights", changed)
    found = compare(runs / "one", runs / "again")
    assert found.weights[0].tensor is None
    assert found.weights[1].largest == pytest.approx(0.5)
    assert found.part_at(0.0) == "other weights after 88 samples"


def test_runs_when_there_is_none_or_the_tolerance_is_none_then_one_sentence_says_so(runs, capsys):
    with pytest.raises(RunInvalid, match="does not exist"):
        compare(runs / "one", runs / "none")
    assert main(["diff", str(runs / "one"), str(runs / "again"), "--tolerance", "2"]) == 2
    assert "tolerance is 2 but must be a number of at least 0 and below 1" in capsys.readouterr().err
