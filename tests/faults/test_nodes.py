"""Two hosts: network namespaces joined by a virtual cable, with runs across them, and a third that does not belong."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.commands import RunFiles, wait_until
from tests.two_hosts import HEAD, OTHER, ROUNDING, Hosts, ended, last_weights

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
UNNAMED = ("train", TASK, "--global-batch-size", "8", "--quiet", "--threads", "1")
TRAIN = (*UNNAMED, "--name", "run", "--epochs", "2")
LONG = (*UNNAMED, "--name", "run", "--epochs", "100", "--task.pause-seconds", "0.05")

SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 1).double())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(64, 4, dtype=torch.float64)
for step in range(int(sys.argv[1])):
    loss = (model(x[rank::world]) - x[rank::world].sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if len(sys.argv) > 2 and step == 3 and rank == int(sys.argv[2]): raise ValueError("on purpose")
    if step > 50: time.sleep(0.05)
if rank == 0:
    torch.save(model.module.state_dict(), f"weights-{world}-{os.environ['GROUP_WORLD_SIZE']}.pt")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("nproc", [2, 4])
def test_training_when_it_is_on_two_hosts_then_its_weights_are_those_of_one(hosts, tmp_path, nproc):
    commands = hosts.both(tmp_path, *TRAIN, "--nproc", nproc // 2, "--record-samples")
    assert ended(commands) == [0, 0], [command.err for command in commands]
    alone = hosts.start(0, tmp_path, *UNNAMED, "--epochs", 2, "--name", "alone", "--nproc", nproc, several=False)
    assert alone.wait() == 0, alone.err
    across, one = last_weights(tmp_path / "runs/run"), last_weights(tmp_path / "runs/alone")
    assert across.keys() == one.keys()
    assert max(np.abs(across[name] - one[name]).max() for name in one) < ROUNDING
    run = RunFiles(tmp_path / "runs/run")
    assert (run.summary()["status"], run.summary()["world_size"]) == ("completed", nproc)
    assert run.events("training")[0]["transport"] == "sockets (gloo)"
    used = [index for rank in range(nproc) for record in run.records(rank) for index in record["samples"]]
    assert sorted(used) == sorted([*range(97)] * 2)


def test_run_when_it_was_on_one_host_then_it_goes_on_on_two(hosts, tmp_path):
    alone = hosts.start(0, tmp_path, *TRAIN, "--nproc", 2, several=False)
    assert alone.wait() == 0, alone.err
    commands = hosts.both(tmp_path, "train", "--resume", "runs/run", "--epochs", 3, "--nproc", 2, "--no-quiet")
    assert ended(commands) == [0, 0], [command.err for command in commands]
    assert commands[1].err == "dure: node 1 takes part in run; node 0 shows how it goes\n"
    assert "epoch 3" in commands[0].err
    run = RunFiles(tmp_path / "runs/run")
    assert (run.summary()["epochs"], run.summary()["world_size"]) == (3.0, 4)


def test_script_when_it_is_on_two_hosts_then_its_weights_are_those_of_one(hosts, tmp_path):
    import torch

    (tmp_path / "script.py").write_text(SCRIPT)
    commands = hosts.both(tmp_path, "run", "--nproc", 2, "--threads", 1, "script.py", 20)
    assert ended(commands) == [0, 0], [command.err for command in commands]
    alone = hosts.start(0, tmp_path, "run", "--nproc", 4, "--threads", 1, "script.py", 20, several=False)
    assert alone.wait() == 0, alone.err
    across, one = (torch.load(tmp_path / f"weights-4-{nodes}.pt", weights_only=True) for nodes in (2, 1))
    assert all((across[name] - one[name]).abs().max() < ROUNDING for name in one)


def test_rank_when_it_fails_on_the_other_host_then_both_name_it_and_end(hosts, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    commands = hosts.both(tmp_path, "run", "--nproc", 2, "--threads", 1, "script.py", 10_000, 3)
    assert ended(commands) == [1, 1]
    for command in commands:
        said = command.err[command.err.index("dure: rank") :]
        assert said.startswith(
            f"dure: rank 3 on node 1 ({os.uname().nodename}, {OTHER}) failed after step 4: ValueError: on purpose"
        )
        assert "script.py:15 in <module>" in said


def test_training_when_a_rank_is_killed_on_one_host_then_the_other_ends_within_two_seconds(hosts, tmp_path):
    commands = hosts.both(tmp_path, *LONG, "--nproc", 2, "--max-restarts", 0)
    RunFiles(tmp_path / "runs/run").wait_for("training", commands[0])
    time.sleep(0.5)
    os.kill(commands[0].ranks(2)[1], signal.SIGKILL)
    killed_at = time.monotonic()
    wait_until(lambda: all(command.code is not None for command in commands), "both ends")
    assert time.monotonic() - killed_at < 2.0 + 1.0  # the launchers themselves take a moment on busy cores
    assert ended(commands) == [1, 1]
    for command in commands:
        assert f"rank 1 on node 0 ({os.uname().nodename}, {HEAD}) was killed (SIGKILL)" in command.err


@pytest.mark.parametrize(
    ("number", "code", "asked"),
    [(signal.SIGTERM, 143, [1]), (signal.SIGINT, 130, [0]), (signal.SIGUSR1, 75, [0, 1])],
)
def test_training_when_launchers_are_asked_to_stop_then_both_say_so_and_nothing_is_lost(
    hosts, tmp_path, number, code, asked
):
    run = RunFiles(tmp_path / "runs/run")
    commands = hosts.both(tmp_path, *LONG, "--nproc", 1)
    run.wait_for("training", commands[0])
    time.sleep(0.5)
    for node in asked:
        commands[node].send(number)
    assert ended(commands) == [code, code], [command.err for command in commands]
    steps = [record["step"] for record in run.records(0)]
    assert run.checkpoints()
    assert run.events("checkpoint")[-1]["step"] == steps[-1]


def test_stop_when_ranks_hang_then_the_last_step_is_saved_within_the_grace_time_on_both_hosts(hosts, tmp_path):
    run, hung = RunFiles(tmp_path / "runs/run"), tmp_path / "hung"
    fault = ("--task.fault", "hang", "--task.rank", 1, "--task.step", 9, "--task.once", hung)
    more = ("--record-samples", "--on-hang", "wait", "--grace-seconds", 8, *fault)
    loud = (word for word in TRAIN if word != "--quiet")
    commands = hosts.both(tmp_path, *loud, "--nproc", 1, *more)
    commands[1].wait_for(hung.exists, "the hang")
    time.sleep(0.3)
    sent = time.monotonic()
    commands[1].send(signal.SIGTERM)
    assert ended(commands, 12.0) == [143, 143], [command.err for command in commands]
    assert time.monotonic() - sent < 8.0 + 1.0  # the ranks by 8; the rest is the summary
    for command in commands:
        assert "stopping: waiting for step " in command.err
        assert "rank 1 is idle at " in command.err  # where the rank is that did not stop
        assert "dure: stopped; continue with `dure train --resume " in command.err
    seen = run.records(0)[-1]["samples_seen"]
    assert run.checkpoints()[-1] == f"samples-{seen:012d}"
    assert seen >= 7 * 8
    commands = hosts.both(tmp_path, "train", "--resume", "runs/run")
    assert ended(commands) == [0, 0], [command.err for command in commands]
    used = [index for rank in range(2) for record in run.records(rank) for index in record["samples"]]
    assert sorted(used) == sorted([*range(97)] * 2)
    alone = hosts.start(0, tmp_path, *UNNAMED, "--epochs", 2, "--name", "alone", several=False)
    assert alone.wait() == 0, alone.err
    across, one = last_weights(run.path), last_weights(tmp_path / "runs/alone")
    assert max(np.abs(across[name] - one[name]).max() for name in one) < ROUNDING


def test_stop_when_ranks_hang_before_the_first_step_then_both_hosts_end_within_the_grace_time(hosts, tmp_path):
    fault = ("--task.fault", "hang", "--task.place", "build_model", "--task.rank", 1, "--task.once", tmp_path / "hung")
    commands = hosts.both(tmp_path, *TRAIN, "--nproc", 1, "--grace-seconds", 2, *fault)
    commands[1].wait_for((tmp_path / "hung").exists, "the hang")
    sent = time.monotonic()
    commands[0].send(signal.SIGUSR1)
    assert ended(commands, 8.0) == [75, 75], [command.err for command in commands]
    assert time.monotonic() - sent < 2.0 + 1.0
    assert all("stopped before the first checkpoint" in command.err for command in commands)


SIGNALLED = """
import os, signal, sys
from dure.cli import main
from dure.launch.rounds.supervisor import _Rounds

begin, calls = _Rounds._next, []

def signalled(rounds):
    calls.append(rounds)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGTERM)  # no rank runs here now
    return begin(rounds)

_Rounds._next = signalled
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("asked", [0, 1])
def test_stop_when_it_comes_between_two_rounds_then_the_last_step_is_saved(hosts, tmp_path, asked):
    run, script, faults = RunFiles(tmp_path / "runs/run"), tmp_path / "signalled.py", tmp_path / "faults.toml"
    script.write_text(SIGNALLED)
    faults.write_text('[[fault]]\nrank = 1\nstep = 6\nkind = "kill"\n')
    words = (*TRAIN, "--nproc", 1, "--snapshot-every", 1, "--max-restarts", 1, "--faults", faults)
    commands = [hosts.start(node, tmp_path, *words, script=script if node == asked else None) for node in range(2)]
    assert ended(commands) == [143, 143], [command.err for command in commands]
    last = run.records(0)[-1]
    assert last["step"] in (4, 5)  # the snapshot of the last step may not be whole yet
    assert run.checkpoints() == [f"samples-{last['samples_seen']:012d}"]


def test_rank_when_it_is_held_on_one_host_then_a_second_look_confirms_it_and_all_start_again(hosts, tmp_path):
    run = RunFiles(tmp_path / "runs/run")
    commands = hosts.both(tmp_path, *TRAIN, "--nproc", 1, "--hang-after", 2, "--task.pause-seconds", 0.05)
    commands[0].wait_for(lambda: len(run.records(0)) > 3, "some steps")
    os.kill(commands[1].ranks(1)[0], signal.SIGSTOP)
    assert ended(commands) == [0, 0], [command.err for command in commands]
    assert [event["rank"] for event in run.events("restart")] == [1]
    assert "rank 1 was stopped from outside" in run.events("hang")[0]["message"]


DEAF = """
import os, signal, time
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
open(f"deaf-{os.environ['RANK']}", "w").close()
time.sleep(1000)
"""


def test_script_when_its_ranks_do_not_follow_a_stop_signal_then_both_hosts_end_them_after_the_grace_time(
    hosts, tmp_path
):
    (tmp_path / "script.py").write_text(DEAF)
    commands = hosts.both(tmp_path, "run", "--nproc", 1, "--threads", 1, "--grace-seconds", 2, "script.py")
    commands[0].wait_for(lambda: len(list(tmp_path.glob("deaf-*"))) == 2, "both ranks")
    sent = time.monotonic()
    commands[1].send(signal.SIGTERM)
    assert ended(commands, 8.0) == [143, 143], [command.err for command in commands]
    assert time.monotonic() - sent < 2.0 + 1.0
    for command in commands:
        assert "after 2 s (--grace-seconds) they are ended as they are" in command.err
        assert command.err.endswith("dure: stopped\n")


HANGING = """
import time, torch, torch.distributed as dist

dist.init_process_group("gloo")
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
for step in range(10):
    optimizer.step()
    if step == 5 and dist.get_rank() == 3: time.sleep(1000)
    dist.all_reduce(torch.ones(3))
"""


def test_rank_when_it_hangs_on_one_host_then_both_say_where_and_that_the_other_waits(hosts, tmp_path):
    (tmp_path / "script.py").write_text(HANGING)
    words = ("run", "--nproc", 2, "--threads", 1, "--name", "run", "--hang-after", 2, "--on-hang", "stop", "script.py")
    commands = hosts.both(tmp_path, *words)
    assert ended(commands) == [1, 1]
    for command in commands:
        said = command.err[command.err.index("no step has finished") :]
        assert "rank 3 is idle at " in said
        assert "script.py:8 in <module>, and ranks 0, 1, 2 wait for it in all_reduce" in said
        assert f"ranks 2 to 3: node 1 ({os.uname().nodename}, {OTHER})" in said
        assert "the ranks were ended because they hung" in said
    assert len(RunFiles(tmp_path / "runs/run").events("hang")) == 1


def test_node_when_its_launcher_is_killed_then_the_other_names_it_and_ends(hosts, tmp_path):
    commands = hosts.both(tmp_path, *LONG, "--nproc", 1)
    RunFiles(tmp_path / "runs/run").wait_for("training", commands[0])
    commands[1].send(signal.SIGKILL)
    began = time.monotonic()
    assert commands[0].wait() == 1
    assert time.monotonic() - began < 5.0
    assert f"dure: node 1 ({os.uname().nodename}, {OTHER}) is gone (" in commands[0].err
    assert "`dure train --resume runs/run` goes on from the last checkpoint" in commands[0].err
    commands[1].wait()


def test_node_when_its_link_is_cut_then_both_name_the_other_after_fifteen_seconds(hosts, tmp_path):
    commands = hosts.both(tmp_path, *LONG, "--nproc", 1)
    RunFiles(tmp_path / "runs/run").wait_for("training", commands[0])
    hosts.inside(1, "ip", "link", "set", "cable", "down")
    try:
        began = time.monotonic()
        assert ended(commands) == [1, 1]
        assert 14.0 < time.monotonic() - began < 20.0
    finally:
        hosts.inside(1, "ip", "link", "set", "cable", "up")
    for command, other in zip(commands, (1, 0), strict=True):
        assert f"dure: node {other} (" in command.err
        assert "is gone (nothing was heard of it for 15 s)" in command.err


def test_node_when_its_secret_is_another_then_it_is_refused_and_the_right_one_comes_in(hosts, tmp_path):
    other = tmp_path / "other"
    other.write_text("another secret of that length")
    other.chmod(0o600)
    head = hosts.start(0, tmp_path, *TRAIN, "--nproc", 1)
    wrong = hosts.start(1, tmp_path, *TRAIN, "--nproc", 1, secret="other")
    assert wrong.wait() == 2
    assert f"node 0 at {HEAD}:29400 has another secret than this node" in wrong.err
    assert other.read_text() not in wrong.err + head.err
    assert head.code is None
    right = hosts.start(1, tmp_path, *TRAIN, "--nproc", 1)
    assert ended((head, right)) == [0, 0], head.err + right.err
    secret = (tmp_path / "secret").read_text().strip()
    kept = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert not [path for path in kept if secret.encode() in path.read_bytes()]


STRANGER = f"""
import socket, time
began = time.monotonic()
try:
    with socket.create_connection(("{HEAD}", 29400), timeout=5) as connection:
        if {{says}}: connection.sendall({{says}})
        while connection.recv(4096): pass
    print("sent away", time.monotonic() - began)
except OSError as error:
    print(type(error).__name__, time.monotonic() - began)
"""


def stranger(hosts: Hosts, says: bytes) -> tuple[str, float]:
    """Return what a client of the third host meets, and after how many seconds."""
    how, seconds = hosts.inside(2, sys.executable, "-c", STRANGER.format(says=says)).rsplit(maxsplit=1)
    return how, float(seconds)


def test_stranger_when_it_knocks_then_it_is_refused_within_a_second_and_the_run_does_not_notice(hosts, tmp_path):
    run = RunFiles(tmp_path / "runs/run")
    head = hosts.start(0, tmp_path, *TRAIN, "--nproc", 1, "--task.pause-seconds", "0.05")
    wait_until(lambda: hosts.listeners(0), "the listener")
    assert hosts.listeners(0) == {"01014D0A"}
    for says in (b"", b"\x00\x00\x00\x02{}", os.urandom(64), b"GET / HTTP/1.1\r\n\r\n"):
        how, seconds = stranger(hosts, says)
        assert how in ("sent away", "ConnectionResetError")
        assert seconds < 1.3
    other = hosts.start(1, tmp_path, *TRAIN, "--nproc", 1, "--task.pause-seconds", "0.05")
    run.wait_for("training", head)
    how, seconds = stranger(hosts, b"")
    assert (how, seconds < 1.0) == ("ConnectionRefusedError", True)
    listening = hosts.listeners(0), hosts.listeners(1)
    assert ended((head, other)) == [0, 0], head.err + other.err
    # the store of rank 0 and gloo's sockets on the cable between the hosts; never on all interfaces
    assert listening[0] == {"01014D0A"}
    assert listening[1] <= {"02014D0A"}
    assert run.summary()["status"] == "completed"


def test_training_when_a_host_does_not_see_the_folder_then_both_are_told(hosts, tmp_path):
    head = hosts.start(0, tmp_path, *TRAIN, "--nproc", 1)
    words = [sys.executable, "-m", "dure", *TRAIN, "--nproc", "1", "--nnodes", "2", "--node-rank", "1"]
    words += ["--rendezvous", f"{HEAD}:29400", "--secret-file", str(tmp_path / "secret")]
    hidden = f"mkdir -p runs && mount -t tmpfs none runs && exec {' '.join(words)}"
    other = subprocess.run(
        ["ip", "netns", "exec", hosts.names[1], "sh", "-c", hidden],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert [head.wait(), other.returncode] == [2, 2], head.err + other.stderr
    for said in (head.err, other.stderr):
        assert "does not see the run's folder run, which node 0 made: put --runs-dir on a file system" in said
    assert not (tmp_path / "runs/run").exists()


def test_nodes_when_their_settings_differ_then_both_are_told_the_field_and_both_values(hosts, tmp_path):
    commands = (
        hosts.start(0, tmp_path, *TRAIN, "--nproc", 1),
        hosts.start(1, tmp_path, *TRAIN, "--nproc", 1, "--seed", 1),
    )
    assert ended(commands) == [2, 2]
    for command in commands:
        assert "nodes do not run the same: seed is 0 on node 0 and 1 on node 1 (" in command.err
    assert not (tmp_path / "runs").exists()


def test_worker_when_it_looks_then_the_secret_is_neither_in_its_environment_nor_its_arguments(hosts, tmp_path):
    (tmp_path / "script.py").write_text(
        "import json, os\n"
        "told = [dict(os.environ), open('/proc/self/cmdline').read(), open('/proc/self/environ').read()]\n"
        "open(f\"told-{os.environ['RANK']}\", 'w').write(json.dumps(told))\n"
    )
    commands = hosts.both(tmp_path, "run", "--nproc", 1, "script.py")
    assert ended(commands) == [0, 0], [command.err for command in commands]
    secret = (tmp_path / "secret").read_text().strip()
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    for rank in range(2):
        told = (tmp_path / f"told-{rank}").read_text()
        assert secret not in told
        environ, interface = json.loads(told)[0], ("to1", "cable")[rank]
        assert (environ["GLOO_SOCKET_IFNAME"], environ["NCCL_SOCKET_IFNAME"]) == (interface, f"={interface}")
