"""Runs under torchrun: its ranks, one run folder, its exit codes, its signals."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.commands import RunFiles, wait_until
from tests.two_hosts import HEAD, OTHER

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
BASE = ("train", TASK, "--global-batch-size", "8", "--epochs", "2", "--quiet", "--name", "run", "--record-samples")

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]


def torchrun(
    folder: Path,
    *words: object,
    nproc: int = 2,
    restarts: int = 0,
    rendezvous: tuple[str, ...] = ("--standalone",),
    inside: str | None = None,
) -> "subprocess.Popen[str]":
    where = [] if inside is None else ["ip", "netns", "exec", inside]
    how = [*rendezvous, "--nproc-per-node", nproc, "--max-restarts", restarts]
    return subprocess.Popen(
        [*where, sys.executable, "-m", "torch.distributed.run", *map(str, (*how, "-m", "dure", *words))],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},  # torchrun leaves a folder of logs there
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_torchrun_when_it_starts_two_ranks_then_they_are_one_run_for_which_one_speaks(tmp_path):
    command = torchrun(tmp_path, *(word for word in BASE if word != "--quiet"))
    out, err = command.communicate(timeout=60)
    assert command.returncode == 0, err
    assert err.count("run folder") == 1
    assert (out + err).count("where the time went") <= 1
    (path,) = (tmp_path / "runs").iterdir()
    run = RunFiles(path)
    assert (run.summary()["status"], run.summary()["world_size"], run.summary()["strategy"]) == ("completed", 2, "ddp")
    used = [index for rank in (0, 1) for record in run.records(rank) for index in record["samples"]]
    assert sorted(used) == sorted([*range(97)] * 2)
    # what torchrun began, our own supervisor goes on with, and the other way round
    again = subprocess.run(
        [sys.executable, "-m", "dure", "train", "--resume", path, "--epochs", "3", "--nproc", "3"], cwd=tmp_path
    )
    assert again.returncode == 0
    command = torchrun(tmp_path, "train", "--resume", path, "--epochs", "4", "--json")
    out, err = command.communicate(timeout=60)
    assert command.returncode == 0, err
    assert json.loads(out)["status"] == "completed", err
    assert run.summary()["samples"] == 4 * 97


def test_torchrun_when_a_rank_fails_then_the_cause_is_shown_and_torchrun_fails(tmp_path):
    command = torchrun(tmp_path, *BASE, "--task.fault", "raise", "--task.rank", "1")
    _, err = command.communicate(timeout=60)
    assert command.returncode == 1
    assert "ValueError: a planned failure" in err
    assert "in fail: raise ValueError" in err
    assert "terminate called" not in err


def test_torchrun_when_settings_cannot_be_then_one_sentence_says_so(tmp_path):
    command = torchrun(tmp_path, *BASE, "--strategy", "single")
    _, err = command.communicate(timeout=60)
    assert command.returncode == 1  # torchrun's code for every failure
    assert err.count("dure: ") >= 1
    assert "Traceback" not in err.replace("Traceback : Signal", "").partition("dure: ")[2].partition("\n")[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("number", "target"), [(signal.SIGINT, "terminal"), (signal.SIGTERM, "agent")])
def test_torchrun_when_it_gets_a_signal_then_ranks_checkpoint_and_the_run_can_be_resumed(number, target, tmp_path):
    command = torchrun(tmp_path, *BASE, "--task.pause-seconds", "0.02")
    run = RunFiles(tmp_path / "runs/run")
    wait_until(lambda: run.events("training"), "training")
    time.sleep(0.1)
    (os.kill if target == "agent" else os.killpg)(command.pid, number)
    _, err = command.communicate(timeout=60)
    assert command.returncode != 0
    assert run.summary()["status"] == "interrupted", err
    seen = run.records(0)[-1]["samples_seen"]
    assert seen < 194
    assert run.checkpoints()[-1] == f"samples-{seen:012d}"


def test_torchrun_when_it_is_killed_then_no_rank_trains_on(tmp_path):
    command = torchrun(tmp_path, *BASE, "--task.pause-seconds", "0.5")
    run = RunFiles(tmp_path / "runs/run")
    wait_until(lambda: run.events("training"), "training")
    ranks = psutil.Process(command.pid).children(recursive=True)
    assert len(ranks) >= 2
    command.kill()
    command.communicate()
    _, alive = psutil.wait_procs(ranks, timeout=2)
    for process in alive:
        process.kill()
    assert alive == []


def test_torchruns_variables_when_they_are_incomplete_then_one_sentence_says_so(prewarmed, tmp_path):
    command = prewarmed.run(tmp_path, *BASE, RANK="0", WORLD_SIZE="2")
    assert command.code == 3
    assert "the environment looks like torchrun's but is incomplete" in command.err


SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist

dist.init_process_group("gloo")
for step in range(20):
    number = torch.ones(1000)
    dist.all_reduce(number)
    assert number[0] == 2
    if step == 5 and dist.get_rank() == 1 and not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
Path(f"rank {dist.get_rank()} of {dist.get_world_size()}").touch()
"""
KILLED_ONCE = '[[fault]]\nrank = 1\nstep = 13\nkind = "kill"\n'


def prepare_kills(folder: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what dure is to do, with a script and with a task, that loses rank 1 once."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "faults.toml").write_text(KILLED_ONCE)
    flags = ("--global-batch-size", "8", "--epochs", "2", "--record-samples", "--checkpoint.every-samples", "40")
    return ("run", "script.py"), ("train", TASK, *flags, "--faults", "faults.toml")


def assert_script_done(folder: Path) -> None:
    assert (folder / "killed").exists()
    assert {path.name for path in folder.glob("rank * of *")} == {"rank 0 of 2", "rank 1 of 2"}


def assert_training_done(folder: Path) -> None:
    (path,) = (folder / "runs").iterdir()
    run = RunFiles(path)
    assert run.summary()["status"] == "completed"
    # the checkpoint of step 10 may still have been under way
    assert [event["step"] for event in run.events("resumed")] in ([5], [10])
    used = [index for rank in (0, 1) for record in run.records(rank) for index in record["samples"]]
    assert sorted(used) == sorted([*range(97)] * 2)


def test_torchrun_when_it_starts_ranks_again_then_they_never_read_what_the_dead_have_left(tmp_path):
    script, training = prepare_kills(tmp_path)
    for words in (script, training):
        command = torchrun(tmp_path, *words, restarts=2)
        _, err = command.communicate(timeout=90)
        assert command.returncode == 0, err
    assert_script_done(tmp_path)
    assert_training_done(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["script", "training"])
def test_agents_when_each_counts_its_own_restarts_then_all_ranks_meet_again(hosts, tmp_path, what):
    words = dict(zip(("script", "training"), prepare_kills(tmp_path), strict=True))[what]
    where = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"{HEAD}:29400")
    agents = [
        torchrun(
            tmp_path, *words, restarts=2, nproc=1, inside=name,
            rendezvous=(*where, "--rdzv-conf", f"is_host={int(address == HEAD)}", "--local-addr", address),
        )
        for name, address in zip(hosts.names, (HEAD, OTHER), strict=False)
    ]  # fmt: skip
    said = [agent.communicate(timeout=120)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    (assert_script_done if what == "script" else assert_training_done)(tmp_path)


def test_run_when_the_launcher_does_what_a_flag_asks_then_each_is_refused(prewarmed, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    started = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    given = ("--nproc", 3, "--max-restarts", 1, "--on-hang", "stop", "--name", "run")
    command = prewarmed.run(tmp_path, "run", *given, "script.py", **started, TORCHELASTIC_RUN_ID="job")
    assert command.code == 2
    for flag in ("max-restarts", "on-hang", "name"):
        assert (
            f"--{flag} is for ranks that dure starts itself, but torchrun started this one: leave it out" in command.err
        )
    assert "nproc is 3 but torchrun started 2 processes here: leave --nproc out" in command.err


def test_ranks_when_each_was_given_its_own_seed_then_both_values_are_told_before_the_first_step(prewarmed, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    commands = [
        prewarmed.start(
            tmp_path, *BASE, "--seed", rank, "--max-restarts", 0,
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0", **meeting,
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [command.wait() for command in commands] == [1, 1], [command.err for command in commands]
    for command in commands:
        assert "rank 0 and rank 1 do not run the same: seed is 0 on rank 0 and 1 on rank 1" in command.err
    assert not RunFiles(tmp_path / "runs/run").records(0)


def test_resume_auto_when_a_rank_comes_late_then_it_joins_the_run_that_the_first_began(prewarmed, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def is_awaited():
        with socket.socket() as first:
            return first.connect_ex(("127.0.0.1", port)) == 0

    commands = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        commands.append(prewarmed.start(tmp_path, *BASE, "--resume", "auto", GROUP_RANK="0", **place, **meeting))
        commands[0].wait_for(is_awaited, "the first rank to wait for the others")
    assert [command.wait() for command in commands] == [0, 0], [command.err for command in commands]
    assert RunFiles(tmp_path / "runs/run").summary()["world_size"] == 2


def test_script_when_mpirun_or_srun_starts_its_ranks_then_it_has_torchruns_variables_and_meets(prewarmed, tmp_path):
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "number = torch.ones(1)\n"
        "dist.all_reduce(number)\n"
        "print(os.environ['LOCAL_RANK'], os.environ['LOCAL_WORLD_SIZE'], int(number), sys.argv[1])\n"
    )
    mpirun = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"
    srun = "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"
    for names, more in ((mpirun, {}), (srun, {"SLURM_STEP_ID": "0", "SLURM_NODEID": "0", "SLURM_JOB_ID": "7"})):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
        commands = [
            prewarmed.start(
                tmp_path, "run", "script.py", "word", **meeting, **more,
                **dict(zip(names, (str(rank), str(rank), "2", "2"), strict=True)),
            )
            for rank in range(2)
        ]  # fmt: skip
        assert [command.wait() for command in commands] == [0, 0], [command.err for command in commands]
        assert sorted(command.out.strip() for command in commands) == ["0 2 2 word", "1 2 2 word"]
    assert not (tmp_path / "runs").exists()
