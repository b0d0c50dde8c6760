"""Ways to start a run: fork, spawn, inline; from scripts with and without a guard, beside threads and other runs."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.commands import SIGNALS, Prewarmed, RunFiles

TASK = Path(__file__).parents[2] / "faulty_task.py"
SMALL = ("--global-batch-size", 8, "--samples", 16, "--quiet")
CALL = "dure.train(Faulty(), nproc=2, global_batch_size=8, samples=16, quiet=True, name='run')"


def script(folder: Path, *lines: str) -> Path:
    """Write a user's script: the task's class in the file that also starts the run."""
    path = folder / "script.py"
    path.write_text("\n".join(["import threading, os", TASK.read_text(), *lines]))
    return path


def final_loss(prewarmed: Prewarmed, folder: Path, *flags: object) -> float:
    command = prewarmed.run(folder, "train", f"{TASK}:Faulty", "--json", *flags, *SMALL)
    assert command.code == 0, command.err
    return json.loads(command.out)["final_loss"]


def test_command_when_it_starts_ranks_then_they_compute_the_same(prewarmed, tmp_path):
    alone = final_loss(prewarmed, tmp_path, "--start", "inline")
    assert final_loss(prewarmed, tmp_path, "--nproc", 2) == pytest.approx(alone, rel=1e-12)


def test_script_when_it_has_no_guard_then_ranks_are_forked_without_reading_it_again(prewarmed, tmp_path):
    command = prewarmed.run(tmp_path, script=script(tmp_path, "print('read')", f"print({CALL}.status)"))
    assert (command.code, command.out) == (0, "read\ncompleted\n"), command.err


THREAD = "threading.Thread(target=threading.Event().wait, daemon=True, name='mine').start()"


@pytest.mark.slow
def test_script_when_threads_run_then_ranks_are_spawned(prewarmed, tmp_path):
    guarded = ["if __name__ == '__main__':", f"    {THREAD}", f"    print({CALL}.status)"]
    command = prewarmed.run(tmp_path, script=script(tmp_path, "print('read')", *guarded))
    assert (command.code, command.out) == (0, "read\ncompleted\n"), command.err
    assert "read" in (tmp_path / "runs/run/logs/rank1.log").read_text()  # a fresh interpreter read the file again


@pytest.mark.slow
def test_script_when_ranks_are_spawned_and_it_has_no_guard_then_the_cure_is_named(prewarmed, tmp_path):
    command = prewarmed.run(tmp_path, script=script(tmp_path, THREAD, CALL))
    assert command.code == 1  # an exception that the script does not catch
    assert "`if __name__ == '__main__':`" in command.err
    assert not (tmp_path / "runs/run").exists()


@pytest.mark.slow
def test_script_when_another_thread_calls_then_it_trains_too(prewarmed, tmp_path):
    lines = [
        "if __name__ == '__main__':",
        f"    thread = threading.Thread(target=lambda: print({CALL}.status))",
        "    thread.start()",
        "    thread.join()",
    ]
    command = prewarmed.run(tmp_path, script=script(tmp_path, *lines))
    assert (command.code, command.out) == (0, "completed\n"), command.err


def test_script_when_it_trains_inline_twice_then_no_process_is_started(prewarmed, tmp_path):
    lines = [
        "os.fork = None",
        "for name in ('a', 'b'):",
        "    settings = dict(strategy='ddp', nproc=1, start='inline', samples=16, global_batch_size=8, quiet=True)",
        "    print(dure.train(Faulty(), name=name, **settings).status)",
    ]
    command = prewarmed.run(tmp_path, script=script(tmp_path, *lines))
    assert (command.code, command.out) == (0, "completed\ncompleted\n"), command.err


def test_script_when_an_inline_run_fails_then_the_next_one_still_trains(prewarmed, tmp_path):
    lines = [
        "settings = dict(strategy='ddp', nproc=1, start='inline', samples=16, global_batch_size=8, quiet=True)",
        "try:",
        "    dure.train(Faulty(fault='raise', step=1), **settings)",
        "except dure.DureError as error:",
        "    print(type(error).__name__)",
        "print(dure.train(Faulty(), **settings).status)",
    ]
    command = prewarmed.run(tmp_path, script=script(tmp_path, *lines))
    assert (command.code, command.out) == (0, "WorkerFailed\ncompleted\n"), command.err


SAFETY = "from dure.launch.worker.fork_safety import reason_not_to_fork as reason"


def test_fork_safety_when_torch_was_only_imported_then_nothing_speaks_against_it(prewarmed, tmp_path):
    lines = ["torch.set_num_threads(1)", "torch.randn(2**21).exp().sum()", SAFETY, "print(reason())"]
    assert prewarmed.run(tmp_path, script=script(tmp_path, *lines)).out == "None\n"


def test_fork_safety_when_torch_has_computed_with_threads_then_it_is_seen(prewarmed, tmp_path):
    compute = ["torch.set_num_threads(2)", "torch.randn(2**21).exp().sum()", "time.sleep(0.5)", SAFETY]
    lines = [
        *compute,
        "print(reason())",
        f"try: {CALL[:-1]}, start='fork', threads=2)",
        "except dure.DureError as e: print(e)",
    ]
    command = prewarmed.run(tmp_path, script=script(tmp_path, *lines))
    first, second = command.out.splitlines()
    assert first == "torch has already computed with several threads in this process"
    assert second.startswith("start is fork but torch has already computed")


@pytest.mark.slow
def test_runs_when_two_begin_at_once_then_both_end_well(prewarmed, tmp_path):
    commands = [prewarmed.start(tmp_path, "train", f"{TASK}:Faulty", "--nproc", 2, *SMALL) for _ in range(2)]
    assert [command.wait() for command in commands] == [0, 0]
    runs = [RunFiles(path) for path in (tmp_path / "runs").iterdir()]
    assert [len(run.records(1)) for run in runs] == [2, 2]


def test_ports_when_a_run_is_on_then_they_listen_on_loopback_alone(prewarmed, tmp_path):
    slow = ("--task.pause-seconds", 0.05, "--task.num-samples", 800, "--epochs", 1, "--global-batch-size", 8)
    command = prewarmed.start(tmp_path, "train", f"{TASK}:Faulty", "--nproc", 2, "--name", "run", *slow, "--quiet")
    RunFiles(tmp_path / "runs/run").wait_for("training", command)
    listening = {
        connection.laddr.ip
        for process in command.processes()
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    command.kill_all()
    command.wait()
    assert listening == {"127.0.0.1"}


@pytest.mark.parametrize("number", SIGNALS)
def test_command_when_it_is_stopped_while_it_imports_then_its_code_says_so(number, prewarmed, tmp_path):
    slow = script(tmp_path, "print('importing', flush=True)", "time.sleep(60)")
    command = prewarmed.start(tmp_path, "train", f"{slow}:Faulty", "--nproc", 2)
    command.wait_for(lambda: "importing" in command.out, "the import")
    command.send(number)
    assert command.wait(2) == SIGNALS[number], command.err
    assert command.err == "dure: stopped\n"
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_output_when_its_reader_goes_away_then_the_run_goes_on(tmp_path):
    words = [sys.executable, "-m", "dure", "train", f"{TASK}:Faulty", "--nproc", "2", "--epochs", "2", "--name", "run"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as command:
        command.stderr.readline()
        command.stderr.close()
        assert command.wait(60) == 0
    assert RunFiles(tmp_path / "runs/run").summary()["status"] == "completed"


def test_cores_when_ranks_share_the_machine_then_each_gets_its_part(prewarmed, tmp_path):
    lines = [
        "class Counting(Faulty):",
        "    def build_model(self):",
        "        print('threads', torch.get_num_threads())",
        "        return super().build_model()",
        "from dure.host.devices import count_cores",
        CALL.replace("Faulty", "Counting"),
        "print(max(1, count_cores() // 2))",
    ]
    command = prewarmed.run(tmp_path, script=script(tmp_path, *lines))
    assert f"threads {command.out.split()[-1]}" in (tmp_path / "runs/run/logs/rank1.log").read_text(), command.err
