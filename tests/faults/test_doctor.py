"""`dure doctor` reads from a run's files what the run itself said when it ended, and what it no longer could."""

import json
import signal
from pathlib import Path

import pytest

from tests.commands import Command, Prewarmed, RunFiles

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
TRAIN = ("train", TASK, "--nproc", 2, "--global-batch-size", 8, "--epochs", 1, "--name", "run")
FAILS = """
import os, torch, torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    raise ValueError("no such thing")
dist.all_reduce(torch.ones(1))
"""
KILLS_ITS_SUPERVISOR = """
import os, signal, time
import torch.distributed as dist

dist.init_process_group("gloo")
print("before", flush=True)
print(f"rank {dist.get_rank()} is at its end", flush=True)
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getppid(), signal.SIGKILL)
    raise ValueError("nobody hears of this")
time.sleep(60)
"""


def fault(kind: str, step: int = 3) -> tuple[object, ...]:
    return ("--task.fault", kind, "--task.rank", 1, "--task.step", step)


def doctor(prewarmed: Prewarmed, folder: Path, *words: object) -> Command:
    return prewarmed.run(folder, "doctor", folder / "runs/run", *words)


def check_same_verdict(prewarmed: Prewarmed, folder: Path, said: str) -> None:
    """See that the doctor's first finding is what the run said, for people and for programs, and what it exits with."""
    told = doctor(prewarmed, folder)
    # a terminal's width breaks lines elsewhere
    assert f"run failed error {' '.join(said.split())}" in " ".join(told.out.split())
    document = json.loads(doctor(prewarmed, folder, "--json").out)
    assert document["status"] == "failed"
    assert document["findings"][0]["what"] == said
    assert document["findings"][0]["severity"] == "error"
    codes = [doctor(prewarmed, folder, "--fail-on", grave).code for grave in ("never", "warning", "error")]
    assert [told.code, *codes] == [0, 0, 4, 4]


def verdict_of(command: Command) -> str:
    """Return what a run said at its end: all from the first line that is dure's own."""
    assert command.code == 1, command.err
    own = [line for line in command.err.splitlines() if not line.startswith("[rank ")]
    first = next(number for number, line in enumerate(own) if line.startswith("dure: "))
    return "\n".join(line.removeprefix("dure: ") for line in own[first:])


# how a run of a task ends -> what its first line and the one below say
ENDS = {
    "raise": ("rank 1 failed after step 2: ValueError: a planned failure", "faulty_task.py:"),
    "kill": ("rank 1 was killed (SIGKILL)", "rank 0 ended as a consequence"),
    "segfault": ("rank 1 was ended by a crash in native code (SIGSEGV) at ", "rank 0 ended as a consequence"),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.faults] * (kind == "segfault")) for kind in ENDS]
)
def test_run_when_it_failed_then_the_doctor_says_what_it_said(kind, prewarmed, tmp_path):
    said = verdict_of(prewarmed.run(tmp_path, *TRAIN, "--max-restarts", 0, *fault(kind)))
    first, below = said.splitlines()[:2]
    assert ENDS[kind][0] in first
    assert ENDS[kind][1] in below
    check_same_verdict(prewarmed, tmp_path, said)


def test_script_when_it_failed_then_the_doctor_says_what_it_said(prewarmed, tmp_path):
    (tmp_path / "script.py").write_text(FAILS)
    said = verdict_of(prewarmed.run(tmp_path, "run", "--nproc", 2, "--name", "run", "script.py"))
    assert said.splitlines()[0] == "rank 1 failed: ValueError: no such thing"
    assert "script.py:7 in <module>: raise ValueError" in said.splitlines()[1]
    check_same_verdict(prewarmed, tmp_path, said)


@pytest.mark.faults
@pytest.mark.alone
def test_run_when_it_hung_and_was_ended_then_the_doctor_says_what_it_said(prewarmed, tmp_path):
    hangs = (*fault("hang", step=5), "--hang-after", 3, "--on-hang", "stop")
    said = verdict_of(prewarmed.run(tmp_path, *TRAIN, *hangs))
    assert said.startswith("no step has finished for ")
    assert "rank 1 is idle at " in said.splitlines()[0]
    assert "faulty_task.py:" in said.splitlines()[0]
    check_same_verdict(prewarmed, tmp_path, said)


@pytest.mark.faults
@pytest.mark.alone
def test_run_while_it_hangs_then_the_doctor_says_what_it_says(prewarmed, tmp_path):
    command = prewarmed.start(tmp_path, *TRAIN, *fault("hang", step=5), "--hang-after", 3, "--on-hang", "wait")
    RunFiles(tmp_path / "runs/run").wait_for("hang", command)
    document = json.loads(doctor(prewarmed, tmp_path, "--json").out)
    command.send_to_all(signal.SIGKILL)
    command.wait()
    assert document["status"] == "running"
    said = command.err[command.err.index("no step has finished") :].rstrip()
    assert document["findings"][0]["what"].endswith(f": {said}")
    # and when it is dead, why it was: it hung
    assert doctor(prewarmed, tmp_path).out.count("rank 1 is idle at ") >= 1


def test_run_when_its_supervisor_was_killed_then_the_doctor_says_how_far_it_came(prewarmed, tmp_path):
    command = prewarmed.start(tmp_path, *TRAIN, "--task.pause-seconds", 0.05)
    run = RunFiles(tmp_path / "runs/run")
    command.wait_for(lambda: min(len(run.records(0)), len(run.records(1))) > 2, "three steps")
    command.send(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    document = json.loads(doctor(prewarmed, tmp_path, "--json").out)
    (finding,) = document["findings"]
    first, below, words = finding["what"].splitlines()
    seen = run.records(0)[-1]["samples_seen"]
    assert document["status"] == "died"
    assert first.startswith(
        "it ended without a word: its supervisor was killed, the machine went down, or the disk was full "
        f"(process {command.pid} on "
    )
    assert first.endswith(f"; {seen} samples had been seen")
    assert below.startswith("  the last step on record is step")
    assert words.startswith("  rank 0 said last: ")
    again = f"`dure train --resume {run.path}`"
    assert finding["remedy"] == f"{again} starts from the beginning: there is no checkpoint yet"
    assert [doctor(prewarmed, tmp_path, "--fail-on", grave).code for grave in ("never", "error")] == [0, 4]


def test_script_when_its_supervisor_died_with_a_rank_then_the_doctor_says_what_is_known(prewarmed, tmp_path):
    (tmp_path / "script.py").write_text(KILLS_ITS_SUPERVISOR)
    command = prewarmed.start(tmp_path, "run", "--nproc", 2, "--name", "run", "script.py")
    assert command.wait() == -signal.SIGKILL
    (finding,) = json.loads(doctor(prewarmed, tmp_path, "--json").out)["findings"]
    assert finding["what"].startswith("it ended without a word: its supervisor was killed")
    assert "only its supervisor knew whether a rank had failed before, and why" in finding["what"]
    assert "  rank 0 said last: rank 0 is at its end" in finding["what"]
    assert finding["files"] == ["logs/rank0.log", "logs/rank1.log"]


@pytest.mark.slow
def test_run_when_it_was_started_again_then_only_a_warning_is_found(prewarmed, tmp_path):
    command = prewarmed.run(tmp_path, *TRAIN, *fault("kill"), "--task.once", tmp_path / "flag")
    assert command.code == 0, command.err
    codes = [doctor(prewarmed, tmp_path, "--fail-on", grave).code for grave in ("never", "warning", "error")]
    assert codes == [0, 4, 0]
    assert "warning  all ranks were started again once" in doctor(prewarmed, tmp_path).out
