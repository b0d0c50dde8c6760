"""A rank fails, in every way and place: all end within two seconds and the first cause is what is shown."""

import re
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.commands import Prewarmed, RunFiles, is_pump, wait_until

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
BASE = ("train", TASK, "--nproc", 2, "--global-batch-size", 8, "--epochs", 1, "--name", "run", "--max-restarts", 0)

LEFT = "before the run was done, and said nothing"
PLANNED = "ValueError: a planned failure"
# fault, place, rank -> what the first line says, and what stands below it
CASES = {
    ("raise", "loss", 1): ("rank 1 failed after step 2: ValueError: a planned failure", "in fail: raise ValueError"),
    ("raise", "loss", 0): ("rank 0 failed after step 2: ValueError: a planned failure", "in fail: raise ValueError"),
    ("sys_exit", "loss", 1): ("rank 1 failed after step 2: SystemExit: the task's code called sys.exit(7)", "sys.exit"),
    ("exit", "loss", 1): (f"rank 1 ended with exit code 3 {LEFT}", "rank 0 ended as a consequence"),
    ("exit_0", "loss", 0): (f"rank 0 ended with exit code 0 {LEFT}", "rank 1 ended as a consequence"),
    ("kill", "loss", 1): ("rank 1 was killed (SIGKILL)", "rank 0 ended as a consequence"),
    ("segfault", "loss", 1): ("rank 1 was ended by a crash in native code (SIGSEGV)", "consequence"),
    ("out_of_memory", "loss", 1): ("use --microbatch-size 2 (the result stays the same)", "torch.empty"),
    ("gpu", "loss", 1): (
        "rank 1 failed after step 2: AcceleratorError: CUDA error: uncorrectable ECC error encountered (the memory of "
        "the GPU had an error that ECC could not mend): look at it with `dure preflight`",
        "in fail: raise torch.AcceleratorError",
    ),
    ("none", "backward", 1): ("RuntimeError: one of the variables needed", "in a library that dure called"),
    ("raise", "build_model", 1): (f"rank 1 failed: {PLANNED}", "in build_model"),
    ("raise", "train_data", 1): (f"rank 1 failed: {PLANNED}", "in train_data"),
    ("raise", "prepare_data", 0): (f"rank 0 failed: {PLANNED}", "in prepare_data"),
    # evaluations are tried before the first step
    ("raise", "eval", 1): (f"rank 1 failed: {PLANNED}", 'self.at("late eval" if'),
    ("raise", "dataset", 0): (f"failed after step 6: {PLANNED}", "in __getitems__"),
}
QUICK = [("raise", "loss", 1), ("kill", "loss", 1), ("exit_0", "loss", 0)]


def check(prewarmed: Prewarmed, folder: Path, case: tuple[str, str, int], *more: object) -> RunFiles:
    fault, place, rank = case
    options = ("--task.fault", fault, "--task.place", place, "--task.rank", rank, "--task.step", 3)
    command = prewarmed.start(folder, *BASE, *options, *more)
    command.ranks(2)
    wait_until(lambda: len(_alive(command)) < 3 or command.code is not None, "the first end")
    assert command.wait(seconds=2) == 1
    cause, below = CASES[case]
    said = command.err[command.err.index("dure: ") :].removeprefix("dure: ")
    assert cause in said.splitlines()[0]
    assert below in "\n".join(said.splitlines()[1:])
    return RunFiles(folder / "runs/run")


def _alive(command) -> list:
    """Return the supervisor and the ranks that there are."""
    found = []
    for process in command.processes():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            is_one = command.pid in (process.pid, process.ppid()) and not is_pump(process)
            found += [process] if is_one else []
    return found


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_rank_when_it_fails_then_all_end_within_two_seconds_and_the_cause_is_shown(case, prewarmed, tmp_path):
    run = check(prewarmed, tmp_path, case, "--quiet")
    assert run.summary()["status"] == "failed"


@pytest.mark.faults
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK], ids=str)
def test_rank_when_it_fails_anywhere_then_the_cause_is_shown(case, prewarmed, tmp_path):
    check(prewarmed, tmp_path, case)


@pytest.mark.faults
def test_gpu_when_it_fails_then_the_doctor_says_of_the_dead_run_what_was_said_then(prewarmed, tmp_path):
    """No GPU is here: the text is the one that torch raises."""
    check(prewarmed, tmp_path, ("gpu", "loss", 1))
    doctor = prewarmed.run(tmp_path, "doctor", "runs/run")
    said = RunFiles(tmp_path / "runs/run").summary()["message"]
    assert [word in said for word in ("rank 1", "after step 2", "faulty_task.py:", "`dure preflight`")] == [True] * 4
    assert "Compile with" not in said
    assert " ".join(said.split()) in " ".join(doctor.out.split())  # which breaks its lines elsewhere


@pytest.mark.faults
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_rank_when_it_fails_while_the_others_hang_then_they_are_ended(start, prewarmed, tmp_path):
    # rank 0 sleeps in its own code, not in a collective: only the supervisor can end it
    task = tmp_path / "hanging.py"
    task.write_text(
        f"import os, sys\nsys.path.insert(0, {str(Path(TASK).parent)!r})\nfrom faulty_task import Faulty, fail\n"
        "class Hanging(Faulty):\n"
        "    def at(self, place):\n"
        "        if place == 'loss' and self.num_losses == 3:\n"
        "            fail('raise' if os.environ['RANK'] == '1' else 'hang')\n"
    )
    base = ("train", f"{task}:Hanging", *BASE[2:])
    command = prewarmed.start(tmp_path, *base, "--start", start)
    run = RunFiles(tmp_path / "runs/run")
    wait_until(lambda: (run.path / "logs/failure-rank1.json").exists(), "rank 1's failure")
    assert command.wait(seconds=2) == 1
    assert "dure: rank 1 failed after step 2: ValueError" in command.err


LOADERS = ("--num-workers", 1)


@pytest.mark.faults
def test_loader_when_the_dataset_raises_in_it_then_the_users_line_is_shown(prewarmed, tmp_path):
    options = ("--task.fault", "raise", "--task.place", "dataset", "--task.step", 3)
    command = prewarmed.run(tmp_path, *BASE, *options, *LOADERS)
    assert command.code == 1
    assert "ValueError: a planned failure (in loader process 0)" in command.err
    assert "in fail: raise ValueError" in command.err
    assert "Original Traceback" not in command.err


@pytest.mark.faults
def test_loader_when_it_is_killed_then_the_rank_says_so(prewarmed, tmp_path):
    options = ("--task.fault", "kill", "--task.place", "dataset", "--task.step", 3)
    command = prewarmed.run(tmp_path, *BASE, *options, *LOADERS)
    assert command.code == 1
    assert "a loader process was killed or crashed (" in command.err
    assert "use fewer --num-workers" in command.err


SLOW = ("--task.pause-seconds", 0.05, "--task.num-samples", 1600, *LOADERS)


@pytest.mark.faults
@pytest.mark.parametrize("victim", ["supervisor", "rank 0", "rank 1", "everybody"])
def test_loaders_when_somebody_is_killed_then_they_are_gone_too(victim, prewarmed, tmp_path):
    command = prewarmed.start(tmp_path, *BASE, *SLOW)
    RunFiles(tmp_path / "runs/run").wait_for("training", command)

    def everybody() -> bool:
        return len([process for process in command.processes() if not is_pump(process)]) == 5

    wait_until(everybody, "a supervisor, two ranks, two loaders")
    if victim == "everybody":
        command.send_to_all(signal.SIGKILL)
    else:
        ranks = command.ranks(2)
        pid = {"supervisor": command.pid, "rank 0": ranks[0], "rank 1": ranks[1]}[victim]
        next(process for process in command.processes() if process.pid == pid).kill()
    command.wait()  # fails when a process is left
    # with the supervisor killed too, nobody is there to remove the folder of the loaders' sockets
    assert len(list(tmp_path.glob("pymp-*"))) == (0 if victim.startswith("rank") else 1)
    assert command.code == (1 if victim.startswith("rank") else -signal.SIGKILL)


@pytest.mark.faults
def test_loss_when_it_is_not_a_number_then_indices_are_kept_and_so_is_the_last_checkpoint(prewarmed, tmp_path):
    options = ("--task.fault", "nan", "--task.place", "nan", "--task.step", 3, "--checkpoint.every-samples", 16)
    command = prewarmed.run(tmp_path, *BASE, *options)
    run = RunFiles(tmp_path / "runs/run")
    (event,) = run.events("loss_not_finite")
    assert command.code == 1
    assert "dure: the loss is nan at step" in command.err
    assert [3 in culprit["samples"] for culprit in event["culprits"]] == [True]
    step = int(re.search(r"at step (\d+) ", event["message"])[1])
    good = (step - 1) * 8 // 16 * 16
    assert run.checkpoints()[-1] == f"samples-{good:012d}"
    assert all(record["loss_sum"] == record["loss_sum"] for record in run.records(0))


FORGING = """
from faulty_task import Faulty


class Forging(Faulty):
    def loss(self, model, batch):
        raise ValueError("\\x1b[2J\\x1b]0;mine\\x07gone\\r\\u202eover\\ndure: all is well")
"""


def test_message_when_it_has_control_characters_then_they_act_on_no_terminal(prewarmed, tmp_path):
    (tmp_path / "forging.py").write_text(f"import sys\nsys.path.insert(0, {str(Path(TASK).parent)!r})\n{FORGING}")
    command = prewarmed.run(tmp_path, "train", "forging.py:Forging", *BASE[2:])
    doctor = prewarmed.run(tmp_path, "doctor", tmp_path / "runs/run")
    for said in (command.err, doctor.out):
        assert r"\x1b[2J\x1b]0;mine\x07gone\x0d\u202eover" in said
        assert not [char for char in said if not (char.isprintable() or char == "\n")]
        assert "\ndure: all is well" not in said
