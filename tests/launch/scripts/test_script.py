"""`dure run`: scripts as they are."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dure.cluster.rank import RankInfo
from dure.launch.scripts.script_worker import environment, local_rank_flag
from dure.process.context import Place, StoreAddress
from dure.process.jobs import ScriptJob
from tests.commands import Command, Prewarmed, RunFiles

TASK = f"{Path(__file__).parents[2] / 'faulty_task.py'}:Faulty"

SCRIPT = """
import argparse, atexit, json, os, sys
import torch, torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--fail", action="store_true")
parsed = parser.parse_args()
atexit.register(lambda: print("left", os.environ["RANK"]))

class Here: pass

if __name__ == "__main__":
    dist.init_process_group("gloo")
    number = torch.ones(1)
    dist.all_reduce(number)
    if parsed.fail and dist.get_rank() == 1:
        raise ValueError("on purpose")
    import pickle
    told = [dist.get_rank(), parsed.local_rank, number.item(), os.path.basename(sys.argv[0])]
    told += [__file__ == os.path.abspath(sys.argv[0])]
    told += [type(pickle.loads(pickle.dumps(Here()))) is Here, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]]
    os.write(1, (json.dumps(told) + "\\n").encode())
    dist.barrier()
    sys.exit(int(os.environ.get("LEAVE", "0")))
"""


def dure_run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    (folder / "script.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "-m", "dure", "run", *words],
        cwd=folder, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def forked(prewarmed: Prewarmed, folder: Path, *words: str, **environ: str) -> Command:
    """The same from a process that has imported torch: some seconds less."""
    (folder / "script.py").write_text(SCRIPT)
    return prewarmed.run(folder, "run", *words, **environ)


def test_script_when_run_on_two_ranks_then_is_as_under_torchrun(tmp_path):
    run = dure_run(tmp_path, "--nproc", "2", "--threads", "1", "--name", "one", "script.py")
    assert run.returncode == 0, run.stderr
    told = sorted(line for line in run.stdout.splitlines() if "left" not in line)
    assert told == [
        f'[rank {rank}] [{rank}, {rank}, 2.0, "script.py", true, true, 1, "1"]' for rank in range(2)
    ]  # fmt: skip
    assert run.stdout.count("left ") == 2
    assert json.loads((tmp_path / "runs/one/summary.json").read_text())["status"] == "completed"
    assert "left 1" in (tmp_path / "runs/one/logs/rank1.log").read_text()


def test_script_when_a_rank_fails_then_the_first_cause_is_named(prewarmed, tmp_path):
    run = forked(prewarmed, tmp_path, "--nproc=2", "--name", "one", "script.py", "--fail")
    assert run.code == 1
    assert "dure: rank 1 failed: ValueError: on purpose\n  script.py:18 in <module>: raise ValueError" in run.err
    assert "[rank 1] [rank1]: ValueError: on purpose" in run.err
    record = json.loads((tmp_path / "runs/one/logs/failure-rank1.json").read_text())
    assert record["user_line"]["line"] == 18


HAS_LOADERS = """
import torch
from torch.utils.data import DataLoader

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 10:
            raise ValueError("on purpose")
        return torch.ones(4)

for batch in DataLoader(Data(), 1, num_workers=1):
    pass
"""


def test_script_when_its_loaders_fail_then_no_folder_of_their_sockets_is_left(prewarmed, tmp_path):
    (tmp_path / "script.py").write_text(HAS_LOADERS)
    run = prewarmed.run(tmp_path, "run", "--nproc=2", "script.py")
    assert "failed: ValueError: on purpose (in loader process 0)" in run.err
    assert not list(tmp_path.glob("pymp-*"))


CLEANS_UP = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
try:
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        raise ValueError("on purpose")
    dist.all_reduce(torch.ones(1))
finally:
    dist.destroy_process_group()
    time.sleep(60 * rank)
"""


def test_script_when_a_rank_cleans_up_after_its_error_then_it_is_named_and_not_the_one_that_lost_it(
    prewarmed, tmp_path
):
    (tmp_path / "tidy.py").write_text(CLEANS_UP)
    run = forked(prewarmed, tmp_path, "--nproc=2", "tidy.py")
    assert run.code == 1
    told = (
        "dure: rank 1 was still handling ValueError: on purpose (tidy.py:11) when the others had lost it; it was ended"
    )
    assert f"{told}\n  tidy.py:15 in <module>\n" in run.err


def test_script_when_a_rank_that_is_started_again_cleans_up_then_the_others_loss_is_no_cause(prewarmed, tmp_path):
    (tmp_path / "tidy.py").write_text(CLEANS_UP)
    (tmp_path / "quick.py").write_text(CLEANS_UP.replace("60", "0.5"))
    run = forked(prewarmed, tmp_path, "--nproc=2", "--max-restarts=1", "tidy.py")
    assert run.err.count("dure: rank 1 was still handling ValueError: on purpose") == 2
    run = forked(prewarmed, tmp_path, "--nproc=2", "--max-restarts=1", "quick.py")
    assert run.err.count("dure: rank 1 failed: ValueError: on purpose") == 2
    assert "dure: rank 0" not in run.err


FORGETS = """
import os
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, error = dist.get_rank(), None
try:
    torch.load("state.pt")
except FileNotFoundError:
    try:
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            raise ValueError("on purpose")
        dist.all_reduce(torch.ones(1))
    except Exception as caught:
        error = str(caught)
dist.destroy_process_group()
time.sleep(0.5 * rank)
if rank:
    raise OSError(error)
{line}
"""


@pytest.mark.parametrize(
    "line",
    ["raise SystemExit('failed')", "raise KeyError('metrics')", "os._exit(1)"],
    ids=["exit", "raise", "os._exit"],
)
def test_script_when_a_rank_forgets_that_it_lost_another_then_it_is_not_blamed(line, prewarmed, tmp_path):
    (tmp_path / "forgetful.py").write_text(FORGETS.format(line=line))
    run = forked(prewarmed, tmp_path, "--nproc=2", "forgetful.py")
    assert run.code == 1
    assert "dure: rank 1 failed: OSError: on purpose" in run.err
    assert "rank 0 ended as a consequence" in run.err


@pytest.mark.parametrize("restarts", [0, 1])
def test_script_when_only_a_wait_noticed_a_forgotten_loss_then_the_rank_that_left_first_is_named(
    restarts, prewarmed, tmp_path
):
    call = "dist.all_reduce(torch.ones(1))"
    script = FORGETS.format(line="raise SystemExit('failed')").replace(call, f"{call[:-1]}, async_op=True).wait()")
    (tmp_path / "forgetful.py").write_text(script.replace("0.5 *", "0.8 *"))
    run = forked(prewarmed, tmp_path, "--nproc=2", f"--max-restarts={restarts}", "forgetful.py")
    assert run.code == 1
    assert run.err.count("dure: rank 1 failed: OSError: on purpose") == 1 + restarts
    assert "and rank 0 ended with exit code 1: failed" in run.err


GIVES_UP = """
import datetime
import os
import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    time.sleep(60)
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError:
    {line}
"""


@pytest.mark.parametrize(
    ("line", "code"),
    [("sys.exit(3)", 3), ("raise ValueError('no answer') from None", 1), ("os._exit(4)", 4)],
    ids=["exit", "raise", "os._exit"],
)
def test_script_when_a_rank_gives_up_waiting_then_the_one_that_did_not_answer_is_named(line, code, prewarmed, tmp_path):
    (tmp_path / "gives_up.py").write_text(GIVES_UP.format(line=line))
    run = forked(prewarmed, tmp_path, "--nproc=2", "gives_up.py")
    assert "dure: rank 1 did not answer, and the others waited in vain; it was ended\n  gives_up.py:13" in run.err
    assert run.code == code


MEETS_LATE = """
import datetime
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
meeting, rank = dist.new_group(timeout=datetime.timedelta(seconds=0.5)), dist.get_rank()
time.sleep(1.2 * rank)
try:
    dist.barrier(group=meeting)
except RuntimeError:
    print("not all are here yet")
try:
    for step in range(3):
        dist.all_reduce(torch.ones(1))
        if step == 1 and rank == 0:
            raise ValueError("on purpose")
finally:
    dist.destroy_process_group()
    time.sleep(0.5 * (1 - rank))
"""


def test_script_when_calls_have_succeeded_since_it_lost_a_rank_then_its_error_is_its_own(prewarmed, tmp_path):
    (tmp_path / "meets.py").write_text(MEETS_LATE)
    run = forked(prewarmed, tmp_path, "--nproc=2", "meets.py")
    assert "not all are here yet" in run.out
    assert "dure: rank 0 failed: ValueError: on purpose" in run.err


GOES_ON = """
import threading, time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    time.sleep(1)
    dist.destroy_process_group()
    time.sleep(60)


def step():
    dist.all_reduce(torch.ones(1))


threading.Thread(target=step).start()
raise ValueError("on purpose")
"""


def test_script_when_a_thread_loses_a_rank_after_the_script_failed_then_the_failure_is_told(prewarmed, tmp_path):
    (tmp_path / "threads.py").write_text(GOES_ON)
    run = forked(prewarmed, tmp_path, "--nproc=2", "threads.py")
    assert "dure: rank 1 failed: ValueError: on purpose" in run.err


OVERCOMES = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        parameter = torch.nn.Parameter(torch.ones(1))
        parameter.grad = torch.ones(1)
        torch.optim.SGD([parameter], 0.1).step()
    raise ValueError("on purpose")
"""


def test_script_when_a_rank_goes_on_without_another_then_its_own_error_is_no_consequence(prewarmed, tmp_path):
    (tmp_path / "alone.py").write_text(OVERCOMES)
    run = forked(prewarmed, tmp_path, "--nproc=2", "alone.py")
    assert "dure: rank 0 failed after step 1: ValueError: on purpose" in run.err


@pytest.mark.parametrize("line", ["signal.alarm(1)", "os.kill(os.getpid(), signal.SIGXCPU)"])
def test_script_when_a_signal_that_nothing_handles_ends_it_then_its_line_is_told(line, prewarmed, tmp_path):
    (tmp_path / "timed.py").write_text(f"import os, signal, time\n{line}\ntime.sleep(10)\n")
    run = forked(prewarmed, tmp_path, "timed.py")
    found = re.search(r"^dure: the worker was ended by .+ \(SIG(ALRM|XCPU, .+)\) at timed.py:(\d)", run.err, re.M)
    assert found is not None, run.err
    assert found[2] == ("3" if "alarm" in line else "2")


INTERRUPTS = """
import os, signal, time

def stop(*_):
    raise KeyboardInterrupt

if {has_handler}:
    signal.signal(signal.SIGTERM, stop)
if os.environ["RANK"] == "0":
    time.sleep(10)
{line}
"""
CAUGHT = """
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
except KeyboardInterrupt:
    exit(130)
"""
RAISED_AGAIN = """
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
except KeyboardInterrupt:
    raise KeyboardInterrupt("saved")
"""


@pytest.mark.parametrize(
    ("has_handler", "line", "code", "said"),
    [
        (False, "raise KeyboardInterrupt", 1, "dure: rank 1 failed: KeyboardInterrupt"),
        (True, "os.kill(os.getpid(), signal.SIGTERM)", 130, "dure: stopped"),
        (False, "os.kill(os.getpid(), signal.SIGINT)", 130, "dure: stopped"),
        (False, RAISED_AGAIN, 130, "dure: stopped"),
        (False, CAUGHT, 130, "dure: stopped"),
    ],
    ids=["no signal", "own handler", "python's handler", "raised again", "caught"],
)
def test_script_when_a_rank_raises_keyboard_interrupt_then_only_a_signals_is_a_stop(
    has_handler, line, code, said, prewarmed, tmp_path
):
    (tmp_path / "interrupts.py").write_text(INTERRUPTS.format(has_handler=has_handler, line=line))
    run = forked(prewarmed, tmp_path, "--nproc=2", "interrupts.py")
    assert (run.code, said in run.err) == (code, True), run.err


LEAVES = """
import sys, torch, torch.distributed as dist

def leave():
    if dist.get_rank() == 1:
        sys.exit({code})

dist.init_process_group("gloo")
leave()
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(
    ("code", "said", "ends_with"),
    [
        ("3", "exit code 3", 3),
        ("130", "exit code 130", 130),
        ("'my own message'", "exit code 1: my own message", 1),
        ("0", "exit code 0, and the others lost it in a call that needs all", 1),
    ],
)
def test_script_when_a_rank_leaves_by_sys_exit_then_its_line_is_named(code, said, ends_with, prewarmed, tmp_path):
    (tmp_path / "leaves.py").write_text(LEAVES.format(code=code))
    run = forked(prewarmed, tmp_path, "--nproc=2", "leaves.py")
    assert run.code == ends_with
    assert f"dure: rank 1 ended with {said}\n  leaves.py:6 in leave: sys.exit({code})\n" in run.err


def test_script_when_all_leave_by_sys_exit_in_order_then_nothing_is_said(prewarmed, tmp_path):
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(0)\n")
    run = forked(prewarmed, tmp_path, "--nproc=2", "leaves.py")
    assert (run.code, run.out, run.err) == (0, "", "")


@pytest.mark.parametrize("how", ["sys.stderr = None", "sys.stderr.close()"])
@pytest.mark.parametrize(
    ("end", "said"),
    [("raise ValueError('why')", "failed: ValueError: why"), ("sys.exit('why')", "ended with exit code 1: why")],
)
def test_script_when_it_has_no_stderr_then_its_failure_is_named(how, end, said, prewarmed, tmp_path):
    (tmp_path / "silent.py").write_text(f"import sys\n{how}\n{end}\n")
    run = forked(prewarmed, tmp_path, "silent.py")
    assert run.code == 1
    assert f"dure: the script {said}\n  silent.py:3 in <module>: {end}" in run.err


@pytest.mark.parametrize("nproc", [1, 2])
def test_script_when_it_is_no_python_then_its_line_is_named(nproc, prewarmed, tmp_path):
    (tmp_path / "syn.py").write_text("x = (\n")
    run = forked(prewarmed, tmp_path, f"--nproc={nproc}", "syn.py")
    assert run.code == 1
    who = "the script" if nproc == 1 else "rank [01]"
    said = r"failed: SyntaxError: '\(' was never closed \(syn\.py, line 1\)"
    assert re.search(rf"^dure: {who} {said}\n  syn\.py:1 in <module>: x = \($", run.err, re.M), run.err
    assert "task" not in run.err
    assert "library" not in run.err


def test_script_when_it_is_a_program_then_the_file_is_named_and_no_fault_of_dure(prewarmed, tmp_path):
    (tmp_path / "program").write_bytes(b"\x7fELF\0\0")
    run = forked(prewarmed, tmp_path, "program")
    assert run.code == 1
    assert (
        "dure: the script failed: SyntaxError: source code string cannot contain null bytes (program, line 1)"
        in run.err
    )
    assert "error in dure" not in run.err


def test_module_when_its_package_asks_for_the_rank_then_only_ranks_import_it(prewarmed, tmp_path):
    (tmp_path / "asks").mkdir()
    (tmp_path / "asks/__init__.py").write_text("import os\nRANK = os.environ['LOCAL_RANK']\n")
    (tmp_path / "asks/train.py").write_text("from asks import RANK\nprint('rank', RANK)\n")
    run = forked(prewarmed, tmp_path, "--nproc=2", "--no-prefix", "-m", "asks.train")
    assert (run.code, sorted(run.out.splitlines())) == (0, ["rank 0", "rank 1"]), run.err
    assert "No module named asks.other" in forked(prewarmed, tmp_path, "-m", "asks.other").err


def test_script_when_alone_then_keeps_the_terminal_and_its_exit_code(prewarmed, tmp_path):
    run = forked(prewarmed, tmp_path, "--nproc", "1", "script.py", LEAVE="3")
    assert run.code == 3
    assert '[0, 0, 1.0, "script.py", true, true' in run.out
    assert not run.out.startswith("[rank")


@pytest.mark.slow
def test_module_when_run_by_spawn_then_finds_itself(prewarmed, tmp_path):
    run = forked(
        prewarmed, tmp_path, "--nproc", "2", "--start", "spawn", "--local-rank-argument", "underscore", "-m", "script"
    )
    assert run.code == 0, run.err
    assert run.out.count('"script.py"') == 2


def test_script_when_it_fails_once_then_is_started_again(prewarmed, tmp_path):
    (tmp_path / "again.py").write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and dist.get_rank() == 1: os.kill(os.getpid(), 9)\n"
        "dist.barrier()\n"
        "os.write(1, b'met\\n')\n"
    )
    run = forked(prewarmed, tmp_path, "--nproc", "2", "--max-restarts", "1", "again.py")
    assert run.code == 0, run.err
    assert run.out.count("met") == 2
    assert "restart 1 of 1" in run.err


@pytest.mark.slow
def test_script_when_it_trains_a_task_then_its_ranks_are_those_of_the_training(prewarmed, tmp_path):
    (tmp_path / "script.py").write_text(
        "import dure\n\nif __name__ == '__main__':\n"
        f"    summary = dure.train({TASK!r}, strategy='ddp', global_batch_size=8, name='trained', quiet=True)\n"
        "    print(summary.status, flush=True)\n"
    )
    command = prewarmed.run(tmp_path, "run", "--nproc", 2, "script.py")
    assert command.code == 0, command.err
    assert sorted(command.out.splitlines()) == ["[rank 0] completed", "[rank 1] completed"]
    assert len(RunFiles(tmp_path / "runs/trained").records(1)) > 1


def test_script_when_its_run_folder_is_removed_then_it_goes_on_and_its_exit_code_counts(prewarmed, tmp_path):
    (tmp_path / "again.py").write_text(
        "import os, shutil, sys\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1':\n"
        "    shutil.rmtree('runs')\n"
        "    raise ValueError('once')\n"
        "sys.exit(5)\n"
    )
    run = forked(prewarmed, tmp_path, "--nproc", "2", "--max-restarts", "1", "--name", "one", "again.py")
    assert run.code == 5, run.err
    assert "dure: runs/one/events.jsonl cannot be written: No such file or directory" in run.err
    assert "restart 1 of 1" in run.err
    assert "ended with exit code 5\n  again.py:5 in <module>: sys.exit(5)" in run.err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "no script is given: write `dure run --nproc 2 train.py ARGUMENTS`"),
        (["nope.py"], "nope.py does not exist: give the path of a Python script, or a module with -m"),
        (["."], ". is a folder without a __main__.py: give the path"),
        (["/dev/null"], "/dev/null is neither a file nor a folder: give the path of a Python script"),
        (["x" * 5000], "x cannot be used: File name too long"),
        (["-m", "no.such.module"], "there is no module no.such.module: give the name that `python -m` takes"),
        (["-m", "script.py"], "script.py is a file and no module: leave -m out"),
        (["--nnodes", "1:4", "script.py"], "nnodes is 1:4, but a script needs all its hosts"),
        (["--nproc", "0", "script.py"], "nproc is '0' but must be from 1 to 4096, auto, gpu or cpu"),
        (["--nproc", "4097", "script.py"], "nproc is '4097' but must be from 1 to 4096, auto, gpu or cpu"),
        (["--max-restarts", "-1", "script.py"], "max_restarts is -1 but must be a number of at least 0"),
        (["--on-hang", "restart", "script.py"], "on_hang is restart but max_restarts is 0"),
        (["--threads", "4097", "script.py"], "threads is 4097 but must be a number above 0 and of at most 4096"),
        (["--hang-after", "0", "script.py"], "hang_after is 0 but must be a number above 0"),
        (["--grace-seconds", "inf", "script.py"], "grace_seconds is inf but must be a number above 0"),
        (["--nprocs", "2", "script.py"], "unknown flag '--nprocs': use --nproc"),
        (["--name", "../x", "script.py"], "'../x' cannot name a run"),
    ],
)
def test_call_when_it_cannot_be_then_one_sentence_says_so(words, sentence, tmp_path, monkeypatch, capsys):
    from dure.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    assert main(["run", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ('p.add_argument("--local_rank", type=int)', "--local_rank"),
        ('p.add_argument("-r", "--local-rank")', "--local-rank"),
        ('print("--local_rank")', None),
        ("this is no python", None),
    ],
)
def test_flag_of_the_old_launcher_when_the_script_has_it_then_is_found(text, flag, tmp_path):
    (tmp_path / "script.py").write_text(text)
    assert local_rank_flag(tmp_path / "script.py") == flag


def test_environment_then_has_every_variable_of_torchrun(monkeypatch):
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    place = Place(
        rank=RankInfo(rank=1, local_rank=1, world_size=2, local_world_size=2),
        store=StoreAddress(host="127.0.0.1", port=1234, prefix=""),
        threads=3,
        is_supervised=True,
        round=2,
    )
    told = environment(ScriptJob(script="script.py", max_restarts=4, run="name"), place)
    assert told == {
        "RANK": "1", "LOCAL_RANK": "1", "GROUP_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234", "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default", "ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2",
        "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "4", "TORCHELASTIC_RUN_ID": "name",
        "TORCHELASTIC_USE_AGENT_STORE": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": "3",
        "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo",
    }  # fmt: skip


def test_ranks_when_no_open_file_would_be_left_to_meet_then_none_starts(prewarmed, tmp_path):
    (tmp_path / "limited.py").write_text(
        "import os, resource, sys\n"
        "from dure.cli.app import main\n"
        # what the command opens, and the ranks', but then torch would try to connect for half an hour
        "few = len(os.listdir('/proc/self/fd')) - 1 + 24\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (few, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "sys.exit(main(['run', '--nproc', '2', 'script.py']))\n"
    )
    (tmp_path / "script.py").write_text(
        "import torch.distributed as dist\ndist.init_process_group('gloo')\nprint('met')\n"
    )
    run = prewarmed.run(tmp_path, script=tmp_path / "limited.py")
    assert run.code == 3
    assert re.search(
        r"^dure: the ranks could not be started: they need about \d+ open files, and \d+ are allowed; use a smaller "
        r"--nproc, or raise the limit on open files \(ulimit -n\)$",
        run.err.splitlines()[-1],
    )


def test_ranks_when_they_need_more_files_than_may_be_open_then_one_sentence_says_so(prewarmed, tmp_path):
    (tmp_path / "limited.py").write_text(
        "import resource, sys\n"
        "from dure.cli.app import main\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (24, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "sys.exit(main(['run', '--nproc', '8', 'limited.py']))\n"
    )
    run = prewarmed.run(tmp_path, script=tmp_path / "limited.py")
    assert run.code == 3
    assert run.err.splitlines()[-1] == (
        "dure: the ranks could not be started: Too many open files; use a smaller --nproc, or raise the limit on open "
        "files (ulimit -n)"
    )
