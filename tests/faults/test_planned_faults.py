"""`--faults`: failures on purpose, each at its rank and step and once."""

from pathlib import Path
from statistics import median

import pytest

import dure
from dure.errors import SpecInvalid, WorkerFailed
from tests.commands import RunFiles
from tests.conformance.cases import TO_ROUNDING, are_same_bits, largest_difference, records_of, weights_of
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kill", "segv", "raise"])
def test_fault_then_it_happens_once_and_the_run_goes_on_as_if_it_had_not(kind, tmp_path):
    undisturbed, disturbed = train(tmp_path, "undisturbed"), train(tmp_path, "disturbed", fault(kind))
    (happened,) = RunFiles(disturbed).events("fault")
    assert (happened["rank"], happened["step"], happened["kind"]) == (1, 4, kind)
    (restart,) = RunFiles(disturbed).events("restart")
    assert (restart["rank"], restart["step"]) == (1, 4)
    assert are_same_bits(weights_of(undisturbed), weights_of(disturbed))
    assert [record["step"] for record in records_of(disturbed)] == list(range(1, 9))


def test_restart_then_what_is_known_of_the_loss_is_not_written_again(tmp_path):
    run = train(tmp_path, "run", fault("kill"))
    (restart,) = RunFiles(run).events("restart")
    assert (run / "loss_traits.json").stat().st_mtime < restart["time"]  # the disk may have become full meanwhile


@pytest.mark.slow
def test_faults_when_several_then_each_has_its_turn(tmp_path):
    run = train(tmp_path, "run", fault("kill", 0, 2) + fault("kill", 1, 3) + fault("slow", 1, 5, "seconds = 0.2"))
    assert [event["kind"] for event in RunFiles(run).events("fault")] == ["kill", "kill", "slow"]
    assert [restart["step"] for restart in RunFiles(run).events("restart")] == [2, 3]


@pytest.mark.parametrize("kinds", [("slow", "nan"), ("kill", "raise", "slow")], ids=" then ".join)
def test_faults_when_several_of_one_rank_in_one_step_then_each_happens_in_its_order(kinds, tmp_path):
    text = "".join(fault(kind, more="seconds = 0.01" if kind == "slow" else "") for kind in kinds)
    run = RunFiles(train(tmp_path, "run", text, on_nonfinite="skip"))
    assert [(event["kind"], event["step"]) for event in run.events("fault")] == [(kind, 4) for kind in kinds]
    assert len(run.events("restart")) == len({"kill", "raise"} & set(kinds))
    assert [event["step"] for event in run.events("step_skipped")] == [4] * ("nan" in kinds)
    assert [record["step"] for record in run.records(0)] == list(range(1, 9))


@pytest.mark.slow
def test_faults_when_one_undoes_another_of_its_step_then_nothing_is_left_of_them(tmp_path):
    undisturbed, disturbed = train(tmp_path, "undisturbed"), train(tmp_path, "disturbed", 2 * fault("flip"))
    assert len(RunFiles(disturbed).events("fault")) == 2
    assert are_same_bits(weights_of(undisturbed), weights_of(disturbed))


def test_faults_when_one_comes_twice_in_a_step_then_it_is_as_if_it_came_again_after_the_restart(tmp_path):
    with pytest.raises(WorkerFailed, match="the same failure came again at step 4 after a restart"):
        train(tmp_path, "run", 2 * fault("kill"))
    assert len(RunFiles(tmp_path / "run").events("fault")) == 2


def test_faults_when_some_never_came_then_a_run_that_is_complete_names_them(tmp_path, capfd):
    text = fault("slow", 1, 4, "seconds = 0.01") + fault("kill", 1, 5000) + fault("raise", 0, 9)
    run = train(tmp_path, "run", text)
    (warning,) = RunFiles(run).events("warning")
    assert warning["message"] == (
        "2 of the planned faults never happened, and the run is complete with step 8: "
        "kill at step 5000 of rank 1, raise at step 9 of rank 0"
    )
    assert capfd.readouterr().err.count(f"dure: {warning['message']}\n") == 1


def test_faults_when_all_came_then_there_is_no_warning(tmp_path):
    assert RunFiles(train(tmp_path, "run", fault("kill"))).events("warning") == []


@pytest.mark.faults
@pytest.mark.alone
def test_stop_then_the_watchdog_finds_the_rank_and_the_run_goes_on_as_if_it_had_not(tmp_path):
    settings = {"hang_after": 3.0, "on_hang": "restart"}
    undisturbed, disturbed = train(tmp_path, "undisturbed"), train(tmp_path, "disturbed", fault("stop"), **settings)
    run = RunFiles(disturbed)
    assert [(event["kind"], event["rank"], event["step"]) for event in run.events("fault")] == [("stop", 1, 4)]
    (hang,) = run.events("hang")
    assert "rank 1 was stopped from outside (SIGSTOP, Ctrl-Z or a debugger)" in hang["message"]
    (restart,) = run.events("restart")
    assert (restart["rank"], restart["step"]) == (1, 4)
    assert are_same_bits(weights_of(undisturbed), weights_of(disturbed))
    assert [record["step"] for record in run.records(0)] == list(range(1, 9))


def test_slow_then_the_step_takes_so_long(tmp_path):
    seconds = 0.5
    run = train(tmp_path, "run", fault("slow", more=f"seconds = {seconds}"))
    by_step = {record["step"]: record["forward_backward_seconds"] for record in records_of(run, 1)}
    assert by_step.pop(4) >= seconds > median(by_step.values())


@pytest.mark.slow
def test_oom_then_the_step_is_repeated_in_halves_and_the_weights_stay(tmp_path):
    undisturbed, disturbed = train(tmp_path, "undisturbed"), train(tmp_path, "disturbed", fault("oom"))
    (halved,) = RunFiles(disturbed).events("microbatch_halved")
    assert (halved["rank"], halved["step"], halved["from"], halved["to"]) == (1, 4, 5, 3)
    assert "planned for step 4 of rank 1" in halved["message"]
    assert RunFiles(disturbed).events("restart") == []
    assert largest_difference(weights_of(undisturbed), weights_of(disturbed)) < TO_ROUNDING
    assert [record["step"] for record in records_of(disturbed)] == list(range(1, 9))


@pytest.mark.slow
def test_nan_then_the_loss_of_that_step_is_none(tmp_path):
    with pytest.raises(WorkerFailed, match=r"the loss is nan at step 4 .*: rank 1, samples .*on_nonfinite=.skip"):
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
        (
            fault("nan") + fault("kill"),
            "fault 1: nan at step 4 of rank 1 cannot show, for fault 2, kill, ends the rank",
        ),
        ("rank = 1", r"must have nothing but tables \[\[fault\]\]"),
        ("[[fault", "is not valid TOML"),
    ],
)
def test_file_when_it_cannot_be_then_every_fault_of_it_is_told_before_anything_starts(text, said, tmp_path):
    with pytest.raises(SpecInvalid, match=said):
        train(tmp_path, "run", text)
    assert not (tmp_path / "run").exists()


def test_file_when_there_is_none_then_it_says_so(tmp_path):
    with pytest.raises(SpecInvalid, match=r"none\.toml, which cannot be read"):
        train(tmp_path, "run", faults=tmp_path / "none.toml")
