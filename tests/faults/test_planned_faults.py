"""`--faults`: failures on purpose, each at its rank and step and once."""

from pathlib import Path

import pytest
import torch

import dure
from dure.errors import SpecInvalid, WorkerFailed
from tests.commands import RunFiles
from tests.conformance.cases import records_of, weights_of
from tests.conformance.tasks import Regression

STEPS = {"samples": 88, "global_batch_size": 11, "snapshot_every": 1}


def train(folder: Path, name: str, text: str = "", **settings) -> Path:
    if text:
        (folder / "faults.toml").write_text(text)
        settings["faults"] = folder / "faults.toml"
    summary = dure.train(
        Regression(optimizer="adamw"), strategy="ddp", nproc=2, runs_dir=folder, name=name, start="fork", threads=1,
        quiet=True, device="cpu", **(STEPS | settings),
    )  # fmt: skip
    return Path(summary.run)


def fault(kind: str, rank: int = 1, step: int = 4, more: str = "") -> str:
    return f'[[fault]]\nrank = {rank}\nstep = {step}\nkind = "{kind}"\n{more}\n'


@pytest.mark.parametrize("kind", ["kill", "segv", "raise"])
def test_fault_then_it_happens_once_and_the_run_goes_on_as_if_it_had_not(kind, tmp_path):
    undisturbed, disturbed = train(tmp_path, "undisturbed"), train(tmp_path, "disturbed", fault(kind))
    (happened,) = RunFiles(disturbed).events("fault")
    assert (happened["rank"], happened["step"], happened["kind"]) == (1, 4, kind)
    (restart,) = RunFiles(disturbed).events("restart")
    assert (restart["rank"], restart["step"]) == (1, 4)
    one, other = weights_of(undisturbed), weights_of(disturbed)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [record["step"] for record in records_of(disturbed)] == list(range(1, 9))


def test_faults_when_several_then_each_has_its_turn(tmp_path):
    run = train(tmp_path, "run", fault("kill", 0, 2) + fault("kill", 1, 3) + fault("slow", 1, 5, "seconds = 0.2"))
    assert [event["kind"] for event in RunFiles(run).events("fault")] == ["kill", "kill", "slow"]
    assert [restart["step"] for restart in RunFiles(run).events("restart")] == [2, 3]


def test_nan_then_the_loss_of_that_step_is_none(tmp_path):
    with pytest.raises(WorkerFailed, match=r"the loss is nan at step 4 .*: rank 1, samples .*--on-nonfinite skip"):
        train(tmp_path, "stopped", fault("nan"))
    run = train(tmp_path, "skipped", fault("nan"), on_nonfinite="skip")
    assert [event["step"] for event in RunFiles(run).events("step_skipped")] == [4]


def test_exit_then_the_rank_is_named(tmp_path):
    with pytest.raises(WorkerFailed, match="rank 1 ended with exit code 3 before the run was done"):
        train(tmp_path, "run", fault("exit"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[fault]]\nrank = 1", r"fault 1: step: Field required\n.*fault 1: kind: Field required"),
        (fault("burn"), "fault 1: kind: Input should be 'kill', 'stop'"),
        (fault("kill", rank=2), "fault 1: rank is 2 but the ranks are 0 to 1"),
        (fault("kill", step=0), "fault 1: step: Input should be greater than or equal to 1"),
        (fault("cut"), "fault 1: kind is cut, but the run is on one host"),
        ("rank = 1", r"must have nothing but tables \[\[fault\]\]"),
        ("[[fault", "cannot be read"),
    ],
)
def test_file_when_it_cannot_be_then_every_fault_of_it_is_told_before_anything_starts(text, said, tmp_path):
    with pytest.raises(SpecInvalid, match=said):
        train(tmp_path, "run", text)
    assert not (tmp_path / "run").exists()


def test_file_when_there_is_none_then_it_says_so(tmp_path):
    with pytest.raises(SpecInvalid, match=r"none\.toml, which cannot be read"):
        train(tmp_path, "run", faults=tmp_path / "none.toml")
