"""Ctrl-C and SIGTERM: a checkpoint at the agreed step, all gone, 130 or 143, and nothing lost on resuming."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dure
from dure.errors import Interrupted, WorkerFailed
from dure.process.round_orders import RoundPlan
from dure.records.step_record import RunSummary
from dure.report.summary import summarise
from dure.training.trainer import Trainer
from tests.commands import MORE_SIGNALS, SIGNALS, Command, Prewarmed, RunFiles
from tests.conformance.zoo.feature import STEPS, ZooTask
from tests.faulty_task import Faulty
from tests.two_hosts import ended

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
BASE = ("train", TASK, "--nproc", 2, "--global-batch-size", 8, "--epochs", 2, "--task.dropout", 0.2, "--record-samples")
PACE = ("--task.pause-seconds", 0.01)


def start(prewarmed: Prewarmed, folder: Path, *more: object) -> tuple[Command, RunFiles]:
    return prewarmed.start(folder, *BASE, "--name", "run", *PACE, *more), RunFiles(folder / "runs/run")


def send(command: Command, target: str, number: int) -> None:
    if target == "supervisor":
        command.send(number)
    elif target == "terminal":
        command.send_to_all(number)
    else:
        os.kill(command.ranks(2)[int(target[-1])], number)


def weights(prewarmed: Prewarmed, folder: Path, run: Path) -> dict[str, torch.Tensor]:
    assert prewarmed.run(folder, "export", run, folder / "weights.safetensors").code == 0
    return load_file(folder / "weights.safetensors")


@pytest.fixture(scope="module")
def undisturbed(prewarmed: Prewarmed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Give the weights of the same run without any signal."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command, run = start(prewarmed, folder)
    assert command.wait() == 0
    return weights(prewarmed, folder, run.path)


def check_nothing_lost(
    prewarmed: Prewarmed, folder: Path, run: RunFiles, undisturbed: dict, *, may_undo: bool = False
) -> None:
    resumed = prewarmed.run(folder, "train", "--resume", run.path)
    assert resumed.code == 0, resumed.err
    assert run.summary()["status"] == "completed"
    for name, tensor in weights(prewarmed, folder, run.path).items():
        assert torch.equal(tensor, undisturbed[name]), name
    assert may_undo or not (run.path / "undone.jsonl").exists()
    for epoch in range(2):
        used = [i for rank in (0, 1) for r in run.records(rank) if r["epoch"] == epoch for i in r["samples"]]
        assert sorted(used) == list(range(97))


TARGETS = ("supervisor", "terminal", "rank 0", "rank 1")
QUICK = [("terminal", signal.SIGINT), ("supervisor", signal.SIGTERM), ("rank 0", signal.SIGUSR1)]
ALL = [
    *((target, number) for target, number in zip(TARGETS, [*SIGNALS, *SIGNALS], strict=True)),
    *((target, signal.SIGUSR1) for target in ("supervisor", "rank 0", "rank 1")),
    *((target, signal.SIGHUP) for target in ("supervisor", "terminal")),
]


def interrupt_training(prewarmed: Prewarmed, folder: Path, target: str, number: int, *more: object) -> RunFiles:
    command, run = start(prewarmed, folder, *more)
    run.wait_for("training", command)
    time.sleep(0.07)
    send(command, target, number)
    assert command.wait(5) == (SIGNALS | MORE_SIGNALS)[number], command.err
    (event,) = run.events("interrupted")[:1]
    assert event["signal"] == number
    assert run.summary()["status"] == "interrupted"
    assert "continue with `dure train --resume" in command.err
    seen = {rank: run.records(rank)[-1]["samples_seen"] for rank in (0, 1)}
    assert run.checkpoints()[-1] == f"samples-{seen[0]:012d}"
    assert seen[0] == seen[1] < 194
    return run


@pytest.mark.slow
@pytest.mark.parametrize(("target", "number"), QUICK)
def test_signal_when_a_run_is_on_then_nothing_is_lost(target, number, prewarmed, tmp_path, undisturbed):
    run = interrupt_training(prewarmed, tmp_path, target, number)
    check_nothing_lost(prewarmed, tmp_path, run, undisturbed)


@pytest.mark.faults
@pytest.mark.parametrize(("target", "number"), [case for case in ALL if case not in QUICK])
def test_signal_when_it_reaches_anybody_then_nothing_is_lost(target, number, prewarmed, tmp_path, undisturbed):
    run = interrupt_training(prewarmed, tmp_path, target, number)
    check_nothing_lost(prewarmed, tmp_path, run, undisturbed)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("more", "number"), [(("--start", "spawn"), signal.SIGINT), (("--num-workers", 1), signal.SIGTERM)], ids=str
)
def test_signal_when_the_terminal_sends_it_to_other_processes_too_then_nothing_is_lost(
    more, number, prewarmed, tmp_path, undisturbed
):
    run = interrupt_training(prewarmed, tmp_path, "terminal", number, *more)
    check_nothing_lost(prewarmed, tmp_path, run, undisturbed)


@pytest.mark.faults
@pytest.mark.parametrize("number", SIGNALS)
def test_signal_when_the_run_is_inline_then_it_can_be_resumed(number, prewarmed, tmp_path):
    alone = (*BASE[:2], *BASE[4:6])
    command = prewarmed.start(tmp_path, *alone, "--epochs", 2, "--start", "inline", "--name", "run", *PACE)
    run = RunFiles(tmp_path / "runs/run")
    run.wait_for("training", command)
    time.sleep(0.07)
    command.send(number)
    assert command.wait(5) == SIGNALS[number], command.err
    assert run.checkpoints()[-1] == f"samples-{run.records(0)[-1]['samples_seen']:012d}"
    assert prewarmed.run(tmp_path, "train", "--resume", run.path).code == 0


@pytest.mark.faults
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("target", TARGETS)
def test_signal_when_data_is_still_prepared_then_it_ends_at_once(target, number, prewarmed, tmp_path):
    command, run = start(prewarmed, tmp_path, "--task.prepare-seconds", 60)
    command.wait_for((tmp_path / "preparing").exists, "the preparation")
    if target == "rank 1":
        time.sleep(0.3)  # it waits in a collective by then, where Python hears nothing until the supervisor ends it
    send(command, target, number)
    if target == "rank 1":
        assert command.code is None
        command.send(number)
    assert command.wait(5) == SIGNALS[number], command.err
    assert run.summary()["status"] == "interrupted"
    assert run.checkpoints() == []
    assert "dure: stopped before the first checkpoint; `dure train --resume" in command.err


@pytest.mark.faults
def test_signal_when_a_second_one_comes_then_all_end_at_once(prewarmed, tmp_path, undisturbed):
    command, run = start(prewarmed, tmp_path, "--checkpoint.every-samples", 16)
    run.wait_for("checkpoint", command)
    ranks = command.ranks(2)
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)  # ranks that cannot follow the first signal
    command.send(signal.SIGINT)
    time.sleep(0.2)
    assert command.code is None
    command.send(signal.SIGINT)
    assert command.wait(3) == 130  # the ranks at once; the rest is the summary, on a machine that does other things too
    assert run.summary()["status"] == "interrupted"
    assert prewarmed.run(tmp_path, "train", "--resume", run.path).code == 0
    for name, tensor in weights(prewarmed, tmp_path, run.path).items():
        assert torch.equal(tensor, undisturbed[name]), name


@pytest.mark.faults
@pytest.mark.parametrize("number", SIGNALS)
def test_signal_when_an_evaluation_is_on_then_the_next_step_is_the_last(number, prewarmed, tmp_path, undisturbed):
    command, run = start(prewarmed, tmp_path, "--task.eval-pause-seconds", 0.1)
    command.wait_for(lambda: run.records(0) and run.records(0)[-1]["samples_seen"] == 97, "the first epoch")
    time.sleep(0.1)
    assert not run.events("evaluated")
    command.send(number)
    assert command.wait(5) == SIGNALS[number], command.err
    assert run.records(0)[-1]["samples_seen"] == 97 + 8
    check_nothing_lost(prewarmed, tmp_path, run, undisturbed)


@pytest.mark.faults
def test_signal_when_the_last_evaluation_is_on_then_the_run_completes(prewarmed, tmp_path, undisturbed):
    command, run = start(prewarmed, tmp_path, "--task.eval-pause-seconds", 0.1)
    command.wait_for(lambda: run.records(0) and run.records(0)[-1]["samples_seen"] == 194, "the last step")
    command.send(signal.SIGTERM)
    assert command.wait(5) == 0, command.err
    assert run.summary()["status"] == "completed"


@pytest.mark.faults
@pytest.mark.parametrize("number", SIGNALS)
def test_signal_when_checkpoints_are_written_all_the_time_then_nothing_is_lost(
    number, prewarmed, tmp_path, undisturbed
):
    run = interrupt_training(prewarmed, tmp_path, "terminal", number, "--checkpoint.every-samples", 8)
    assert not list(run.path.glob("checkpoints/.*"))
    check_nothing_lost(prewarmed, tmp_path, run, undisturbed)


@pytest.mark.faults
@pytest.mark.parametrize("number", SIGNALS)
def test_signal_when_an_evaluation_is_the_command_then_it_stops_at_once(number, prewarmed, tmp_path):
    assert prewarmed.run(tmp_path, *BASE, "--name", "run", "--task.eval-pause-seconds", 0.2).code == 0
    command = prewarmed.start(tmp_path, "eval", tmp_path / "runs/run", "--nproc", 2)
    command.ranks(2)
    time.sleep(0.3)
    command.send_to_all(number)
    assert command.wait(2) == SIGNALS[number], command.err
    assert "the evaluation was stopped" in command.err
    assert not list((tmp_path / "runs/run").glob(".evaluation*"))


SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist

rank, does, heeds = int(os.environ["RANK"]), sys.argv[1], sys.argv[2] == "heeds"

def stop(number, frame):
    Path(f"rank {rank} heard {number}").touch()
    sys.exit(128 + number)

if heeds:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
Path(f"rank {rank} is {os.getpid()}").touch()
while True:
    if does == "meets":
        dist.all_reduce(torch.ones(1))
    time.sleep(0.01)
"""
MOST_SECONDS = 5.0
"""Limit from the signal to the end of all. A launcher that only waits for the others would give them thirty."""


def signal_script(prewarmed: Prewarmed, folder: Path, target: str, number: int, *words: str) -> Command:
    """Run a script on two ranks, signal somebody while both are at work, and wait for the end."""
    (folder / "script.py").write_text(SCRIPT)
    command = prewarmed.start(folder, "run", "--nproc", 2, "--name", "run", "script.py", *words)
    pids = command.wait_for(lambda: (found := sorted(folder.glob("rank * is *")))[1:] and found, "both ranks at work")
    pid = command.pid if target == "supervisor" else int(pids[int(target[-1])].name.split()[-1])
    os.kill(pid, number)
    command.wait(MOST_SECONDS)
    return command


# who gets which signal while the ranks meet or work apart, whether they have handlers, and whose are sure to run:
# a rank that loses the other in a collective may fail before it hears anything
SCRIPT_CASES = [
    *(("supervisor", number, "meets", "heeds", (0, 1)) for number in SIGNALS),
    ("supervisor", signal.SIGUSR1, "meets", "heeds not", ()),
    ("rank 0", signal.SIGTERM, "meets", "heeds", (0,)),
    ("rank 1", signal.SIGTERM, "meets", "heeds not", ()),
    ("rank 1", signal.SIGTERM, "works", "heeds", (0, 1)),
    ("rank 1", signal.SIGTERM, "works", "heeds not", ()),
]


@pytest.mark.parametrize(("target", "number", "does", "heeds", "hears"), SCRIPT_CASES)
def test_script_when_somebody_gets_a_signal_then_it_is_passed_on_and_all_end(
    target, number, does, heeds, hears, prewarmed, tmp_path
):
    command = signal_script(prewarmed, tmp_path, target, number, does, heeds)
    assert command.code == (SIGNALS | MORE_SIGNALS)[number], command.err
    assert all((tmp_path / f"rank {rank} heard {int(number)}").exists() for rank in hears)
    assert RunFiles(tmp_path / "runs/run").summary()["status"] == "interrupted"
    assert "dure: stopped" in command.err


@pytest.mark.faults
def test_script_on_two_hosts_when_only_a_rank_gets_a_signal_then_those_of_the_other_host_hear_it_too(hosts, tmp_path):
    (tmp_path / "secret").write_text("a word of at least sixteen characters\n")
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "script.py").write_text(SCRIPT)
    commands = hosts.both(tmp_path, "run", "--nproc", 1, "--name", "run", "script.py", "works", "heeds")
    (found,) = commands[1].wait_for(lambda: list(tmp_path.glob("rank 1 is *")), "rank 1 at work")
    commands[0].wait_for(lambda: list(tmp_path.glob("rank 0 is *")), "rank 0 at work")
    os.kill(int(found.name.split()[-1]), signal.SIGTERM)
    assert ended(commands, MOST_SECONDS) == [143, 143], [command.err for command in commands]
    assert all((tmp_path / f"rank {rank} heard {int(signal.SIGTERM)}").exists() for rank in (0, 1))


SWALLOWS = """
import os, signal, sys
sys.path.insert(0, {folder!r})
try:
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):
        pass
except BaseException:
    {then}
from faulty_task import Faulty
"""


@pytest.mark.parametrize("then", ["pass", "raise ImportError('another error')"])
@pytest.mark.parametrize("nproc", [1, 2])
def test_signal_when_an_import_swallows_it_then_it_stops_the_run_all_the_same(nproc, then, prewarmed, tmp_path):
    (tmp_path / "swallows.py").write_text(SWALLOWS.format(folder=str(Path(__file__).parents[1]), then=then))
    command = prewarmed.run(tmp_path, "train", "swallows.py:Faulty", "--nproc", nproc, "--name", "run")
    assert (command.code, command.err) == (143, "dure: stopped\n")
    assert not (tmp_path / "runs/run").exists()


@pytest.mark.faults
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_signal_when_ranks_hang_then_the_last_step_is_saved_within_the_grace_time(
    strategy, prewarmed, tmp_path, undisturbed
):
    fault = ("--task.fault", "hang", "--task.rank", 1, "--task.step", 9, "--task.once", tmp_path / "hung")
    more = ("--strategy", strategy, "--on-hang", "wait", "--grace-seconds", 6, *fault)
    command, run = start(prewarmed, tmp_path, *more)
    command.wait_for((tmp_path / "hung").exists, "the hang")
    time.sleep(0.3)
    sent = time.monotonic()
    command.send(signal.SIGTERM)
    assert command.wait(9) == 143, command.err
    assert time.monotonic() - sent < 7  # the ranks by 6; the rest is the summary, as above
    assert "stopping: waiting for step " in command.err
    assert "faulty_task.py" in command.err  # where a rank is that did not stop
    assert run.checkpoints()[-1] == f"samples-{run.records(0)[-1]['samples_seen']:012d}"
    assert run.records(0)[-1]["samples_seen"] >= 8
    if strategy == "ddp":
        check_nothing_lost(prewarmed, tmp_path, run, undisturbed, may_undo=True)


@pytest.mark.faults
def test_signal_when_ranks_are_held_then_the_last_step_is_saved(prewarmed, tmp_path, undisturbed):
    command, run = start(prewarmed, tmp_path, "--grace-seconds", 5)
    run.wait_for("training", command)
    command.wait_for(lambda: len(run.records(0)) > 3, "some steps")
    for pid in command.ranks(2):
        os.kill(pid, signal.SIGSTOP)
    command.send(signal.SIGUSR1)
    assert command.wait(8) == 75, command.err
    check_nothing_lost(prewarmed, tmp_path, run, undisturbed, may_undo=True)


@pytest.mark.faults
def test_signal_when_ranks_hang_before_the_first_step_then_nothing_is_saved(prewarmed, tmp_path):
    fault = ("--task.fault", "hang", "--task.place", "build_model", "--task.rank", 1)
    command, _ = start(prewarmed, tmp_path, "--grace-seconds", 1, *fault)
    command.ranks(2)
    for pid in command.ranks(2):
        os.kill(pid, signal.SIGSTOP)
    command.send(signal.SIGTERM)
    assert command.wait(3) == 143, command.err
    assert "stopped before the first checkpoint" in command.err


def test_first_ctrl_c_when_a_step_is_long_then_it_says_what_it_waits_for(prewarmed, tmp_path):
    command = prewarmed.start(tmp_path, *BASE, "--name", "run", "--task.pause-seconds", 6)
    RunFiles(tmp_path / "runs/run").wait_for("training", command)
    command.send(signal.SIGINT)
    said = "stopping: waiting for step 1 and the next one to end (begun "
    command.wait_for(lambda: said in command.err, "the answer")
    assert "A second Ctrl-C ends the ranks at once" in command.err
    command.send(signal.SIGINT)
    assert command.wait(2) == 130


@pytest.mark.faults
def test_signal_when_a_rank_is_held_and_then_killed_then_the_last_step_is_saved(prewarmed, tmp_path, undisturbed):
    command, run = start(prewarmed, tmp_path)
    run.wait_for("training", command)
    command.wait_for(lambda: len(run.records(0)) > 3, "some steps")
    held = command.ranks(2)[1]
    os.kill(held, signal.SIGSTOP)
    command.send(signal.SIGINT)
    time.sleep(0.3)
    os.kill(held, signal.SIGKILL)
    assert command.wait(5) == 130, command.err
    assert run.checkpoints()
    check_nothing_lost(prewarmed, tmp_path, run, undisturbed, may_undo=True)


@pytest.mark.faults
def test_signal_when_ranks_start_again_then_the_last_step_is_saved(prewarmed, tmp_path):
    slow = ("--task.place", "build_model", "--task.fault", "none")
    command, run = start(prewarmed, tmp_path, *slow)
    run.wait_for("training", command)
    command.wait_for(lambda: len(run.records(0)) > 3, "some steps")
    os.kill(command.ranks(2)[1], signal.SIGKILL)
    command.wait_for(lambda: run.events("restart"), "the restart")
    command.send(signal.SIGTERM)
    assert command.wait(5) == 143, command.err
    assert run.checkpoints()


@pytest.mark.faults
def test_signal_when_it_comes_between_two_rounds_then_the_last_step_is_saved(monkeypatch, tmp_path):
    decided = RoundPlan.after_restart

    def signalled(*plan, **more):
        os.kill(os.getpid(), signal.SIGTERM)  # no rank runs now
        return decided(*plan, **more)

    monkeypatch.setattr(RoundPlan, "after_restart", signalled)
    faults = tmp_path / "faults.toml"
    faults.write_text('[[fault]]\nrank = 1\nstep = 8\nkind = "kill"\n')
    settings = {"snapshot_every": 1, "max_restarts": 1, "faults": faults, "quiet": True, "start": "fork", "threads": 1}
    with pytest.raises(Interrupted, match="continue with"):
        dure.train(ZooTask(), strategy="ddp", nproc=2, device="cpu", runs_dir=tmp_path, name="run", **settings, **STEPS)
    run = RunFiles(tmp_path / "run")
    last = run.records(0)[-1]
    assert last["step"] in (6, 7)  # the snapshot of the last step may not be whole yet
    assert run.checkpoints()[-1] == f"samples-{last['samples_seen']:012d}"


@pytest.mark.faults
@pytest.mark.parametrize("how", ["stop", "heal"])
def test_signal_when_the_last_save_finds_replicas_that_differ_then_nothing_of_them_is_saved(how, monkeypatch, tmp_path):
    act = Trainer._act

    def signalled(self, boundary, before, requests):
        if boundary.step == 6 and self.is_first:
            os.kill(os.getppid(), signal.SIGTERM)
        act(self, boundary, before, requests)

    monkeypatch.setattr(Trainer, "_act", signalled)
    faults = tmp_path / "faults.toml"
    faults.write_text(
        '[[fault]]\nrank = 1\nstep = 6\nkind = "flip"\n[[fault]]\nrank = 0\nstep = 7\nkind = "slow"\nseconds = 0.2\n'
    )
    settings = {"snapshot_every": 1, "max_restarts": 1, "faults": faults, "quiet": True, "start": "fork", "threads": 1}
    replicas = {"check_replicas_every": 100, "on_divergence": how}
    with pytest.raises(WorkerFailed, match="differ"):
        dure.train(
            ZooTask(),
            strategy="ddp",
            nproc=2,
            device="cpu",
            runs_dir=tmp_path,
            name="run",
            **settings,
            **replicas,
            **STEPS,
        )
    run = RunFiles(tmp_path / "run")
    assert (len(run.events("replicas_diverged")), run.checkpoints()) == (1, ["samples-000000000022"])


@pytest.mark.faults
def test_signal_when_there_are_no_restarts_then_two_steps_have_the_whole_grace_time(prewarmed, tmp_path):
    pace = ("--task.pause-seconds", 4, "--max-restarts", 0, "--grace-seconds", 14)
    command = prewarmed.start(tmp_path, *BASE, "--name", "run", *pace)
    run = RunFiles(tmp_path / "runs/run")
    command.wait_for(lambda: run.records(0), "the first step")
    time.sleep(0.2)  # the second, of 4 s, is under way: ranks agree on the stop in the third
    command.send(signal.SIGTERM)
    assert command.wait(16) == 143, command.err
    assert run.checkpoints() == ["samples-000000000024"]
    assert not (run.path / "undone.jsonl").exists()
    assert "faulty_task.py" in command.err  # where the ranks are at half time...
    assert run.events("hang") == []  # ...though a long step is no hang


TWICE = """
import os, signal, sys, time
import torch.distributed as dist

dist.init_process_group("gloo")
received = []

def save(number, frame):
    received.append(number)
    if len(received) > 1:
        os._exit(9)
    time.sleep(0.5)
    open(f"saved{dist.get_rank()}", "w").close()
    print("unfinished", end="")
    os._exit(0)

signal.signal(signal.SIGTERM, save)
open(f"ready{dist.get_rank()}", "w").close()
while True:  # short sleeps: a signal just before a sleep would be answered after it
    time.sleep(0.05)
"""


@pytest.mark.faults
def test_script_when_its_whole_group_is_signalled_then_each_rank_gets_the_signal_once(prewarmed, tmp_path):
    (tmp_path / "twice.py").write_text(TWICE)
    command = prewarmed.start(tmp_path, "run", "--nproc", 2, "--name", "run", "twice.py")
    command.wait_for(lambda: len(list(tmp_path.glob("ready?"))) == 2, "the ranks")
    os.killpg(os.getpgid(command.pid), signal.SIGTERM)
    command.wait(8)
    assert len(list(tmp_path.glob("saved?"))) == 2, command.err
    assert (command.out + command.err).count("unfinished") == 2


def test_summary_when_a_signal_comes_while_it_is_made_then_it_is_written_all_the_same(tmp_path, monkeypatch):
    def interrupted(*args: object) -> RunSummary:
        os.kill(os.getpid(), signal.SIGINT)
        return summarise(*args)

    monkeypatch.setattr("dure.api.local.summarise", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        dure.train(Faulty(), start="fork", threads=1, quiet=True, runs_dir=tmp_path, name="run")
    assert RunFiles(tmp_path / "run").summary()["status"] == "completed"
