"""A rank hangs: who, where, since when; and the run goes on without a lost sample."""

import contextlib
import functools
import json
import os
import re
import signal
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest

from dure.errors import WorkerFailed
from dure.launch.hangs.watchdog import LEAST_SECONDS
from tests.commands import Command, Prewarmed, RunFiles, wait_until
from tests.conformance.cases import largest_difference, weights_of
from tests.conformance.tasks import Regression
from tests.faults.test_restarts import each_step_once, train

pytestmark = [pytest.mark.faults, pytest.mark.alone]

HANG_AFTER_SECONDS = 3.0
"""Longer than a first step takes where nothing has been imported yet."""
MOST_SECONDS_LATER = 5.0
"""Limit within which a hang is reported once it has lasted so long."""


class Hangs(Regression):
    """One rank stops getting on, once."""

    how: str = ""
    flag: str = ""
    """A file that is written when it does."""

    def loss(self, model, batch):
        self.done = getattr(self, "done", 0) + 1
        if self.how and os.environ.get("RANK") == "1" and self.done == 9 and not Path(self.flag).exists():
            Path(self.flag).write_text("")
            getattr(self, self.how)()
        return super().loss(model, batch)

    def sleeps(self):
        time.sleep(1000)  # HERE

    def loops(self):
        while True:
            pass  # HERE

    def locks(self):
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # HERE

    def stops(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def pauses(self):
        time.sleep(6.0)


class HangsAtStart(Hangs):
    """The same before the first step."""

    def build_model(self):
        if os.environ.get("RANK") == "1" and not Path(self.flag).exists():
            Path(self.flag).write_text("")
            getattr(self, self.how)()
        return super().build_model()


LINES = [number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# HERE" in text]


def hung(run: Path) -> str:
    return json.loads((run / "logs" / "hang-1.json").read_text())["text"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    @functools.cache
    def weights(**settings):
        return weights_of(train(tmp_path_factory.mktemp("undisturbed"), "run", "ddp", 2, Hangs(), **settings))

    return weights


@pytest.mark.parametrize("how", ["sleeps", "loops", "locks", "stops"])
@pytest.mark.parametrize("backend", ["gloo", "dure_shm"])
def test_run_when_a_rank_hangs_then_it_is_named_and_all_go_on(how, backend, undisturbed, tmp_path, capfd):
    settings = {"backend": backend, "hang_after": HANG_AFTER_SECONDS}
    expected_weights = undisturbed(**settings)
    run = train(tmp_path, "hung", "ddp", 2, Hangs(how=how, flag=str(tmp_path / "flag")), **settings)
    text = hung(run)
    # the three lines stand in the order of sleeps, loops (of two lines, the innermost) and locks
    expected = {"sleeps": 0, "loops": 1, "locks": 2}.get(how)
    if expected is None:
        progress = re.findall(r"^  rank [01] .*(, in step 8 .evaluating., after collective #\d+)$", text, re.M)
        assert len(progress) == 2, text
        assert progress[0] == progress[1]
    else:
        near = LINES[expected] - (how == "loops"), LINES[expected]
        assert any(f"test_hangs.py:{line} in {how}" in text for line in near), text
    assert "rank 0 waits for it in all_" in text
    assert "no step has finished for" in capfd.readouterr().err
    assert [event["rank"] for event in RunFiles(run).events("restart")] == [1]
    assert each_step_once(run, 2)
    assert largest_difference(weights_of(run), expected_weights) == 0.0


def test_run_when_it_hangs_and_is_to_stop_then_says_why_and_can_be_resumed(tmp_path):
    settings = {"hang_after": HANG_AFTER_SECONDS, "on_hang": "stop"}
    with pytest.raises(WorkerFailed, match=r"ended because they hung \(on_hang=\); `dure.train\(resume='.*` goes on"):
        train(tmp_path, "hung", "ddp", 2, Hangs(how="sleeps", flag=str(tmp_path / "flag")), **settings)
    assert json.loads((tmp_path / "hung" / "summary.json").read_text())["status"] == "failed"


def test_run_when_it_is_to_wait_then_says_why_and_waits(tmp_path):
    helper = threading.Thread(target=do_what_the_verdict_says, args=(tmp_path / "waits",))
    helper.start()
    task = Hangs(how="stops", flag=str(tmp_path / "flag"))
    run = train(tmp_path, "waits", "ddp", 2, task, on_hang="wait", hang_after=HANG_AFTER_SECONDS, start="spawn")
    helper.join()
    assert "`kill -CONT" in hung(run)
    assert RunFiles(run).events("restart") == []


@pytest.mark.parametrize(("how", "restarted"), [("stops", [1]), ("pauses", [])])
def test_run_when_a_rank_hangs_before_it_begins_then_is_named_and_ended_if_it_is_stopped(
    how, restarted, tmp_path, monkeypatch
):
    monkeypatch.setattr("dure.launch.hangs.watchdog.START_SECONDS", HANG_AFTER_SECONDS)
    task = HangsAtStart(how=how, flag=str(tmp_path / "flag"))
    run = train(tmp_path, "hung", "ddp", 2, task, hang_after=HANG_AFTER_SECONDS)
    first = hung(run).splitlines()[0]
    assert ("rank 1 was stopped from outside" if how == "stops" else "in pauses") in first
    assert [event["rank"] for event in RunFiles(run).events("restart")] == restarted
    assert each_step_once(run, 2)


@pytest.mark.slow
def test_run_when_nothing_is_said_of_hangs_then_ten_seconds_are_one_and_all_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr("dure.launch.hangs.watchdog.TIMES_UNCERTAIN", 1.5)  # whoever sleeps may only be slow
    flag = tmp_path / "flag"
    run = train(tmp_path, "hung", "ddp", 2, Hangs(how="sleeps", flag=str(flag)))
    record = json.loads((run / "logs" / "hang-1.json").read_text())
    # the flag is written within the step, and the step is the last heartbeat
    assert -0.5 < record["time"] - flag.stat().st_mtime - LEAST_SECONDS < MOST_SECONDS_LATER
    assert record["culprits"] == [1]
    assert f"test_hangs.py:{LINES[0]} in sleeps" in record["text"]
    assert [event["rank"] for event in RunFiles(run).events("restart")] == [1]
    assert each_step_once(run, 2)


def do_what_the_verdict_says(run: Path) -> None:
    found = run / "logs" / "hang-1.json"
    wait_until(found.is_file, "the verdict", seconds=60)
    ranks = json.loads(found.read_text())["ranks"]
    os.kill(next(rank["pid"] for rank in ranks if rank["is_stopped"]), signal.SIGCONT)


SCRIPT = """
    import os, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        if step == 3 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep({seconds})
        dist.all_reduce(torch.ones(1))
        optimizer.step()
    print("all five steps")
"""


def run_script(prewarmed: Prewarmed, folder: Path, sleeps_seconds: float, *words: object) -> Command:
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT.format(seconds=sleeps_seconds)))
    return prewarmed.run(
        folder, "run", "--nproc", 2, "--threads", 1, "--name", "run", "--hang-after", 2, *words, "script.py"
    )


def test_script_when_it_hangs_and_is_to_restart_then_begins_anew_and_completes(prewarmed, tmp_path):
    run = run_script(prewarmed, tmp_path, 1000, "--on-hang", "restart", "--max-restarts", 1)
    assert run.code == 0, run.err
    assert run.err.count("no step has finished for") == 1
    assert "rank 1 is idle at script.py:8 in <module>, and rank 0 waits for it in all_reduce #4" in run.err
    assert [event["rank"] for event in RunFiles(tmp_path / "runs" / "run").events("restart")] == [1]
    assert run.out.count("all five steps") == 2


NOTICES = """
    import ctypes, os, select, signal, subprocess, threading, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    interrupted = []
    signal.signal(signal.SIGRTMIN + 7, lambda *_: interrupted.append("signal"))
    read, write = os.pipe()
    waits = {
        "usleep": lambda: ctypes.CDLL(None, use_errno=True).usleep(2_500_000) == 0,
        "poll": lambda: ctypes.CDLL(None).poll(None, 0, 2500) == 0,
        "select": lambda: select.select([read], [], [], 2.5) == ([], [], []),
        "subprocess": lambda: subprocess.run(["sleep", "2.5"]).returncode == 0,
    }
    for name, wait in waits.items():
        if dist.get_rank() == 1:
            began = time.monotonic()
            assert wait(), name
            assert time.monotonic() - began >= 2.4, name
        dist.barrier()
    assert not interrupted
    signal.signal(signal.SIGRTMIN + 7, signal.SIG_IGN)
    if dist.get_rank() == 1:
        assert ctypes.PyDLL(None).sleep(4) == 0
    dist.barrier()
    print("noticed nothing")
"""


def test_script_when_it_is_looked_at_then_no_call_of_its_is_interrupted(prewarmed, tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(NOTICES))
    run = prewarmed.run(tmp_path, "run", "--nproc", 2, "--threads", 1, "--name", "run", "--hang-after", 1, "script.py")
    assert run.code == 0, run.err
    assert run.out.count("noticed nothing") == 2
    assert run.err.count("has finished for") >= 4


LEAVES = """
    import os, subprocess, sys, time, torch, torch.distributed as dist
    from torch.utils.data import DataLoader, Dataset

    class Data(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            note(os.getpid())
            time.sleep(1000)

    def note(pid):
        with open("pids", "a") as file:
            file.write(f"{pid}\\n")

    dist.init_process_group("gloo")
    note(subprocess.Popen(["sleep", "1000"]).pid)
    with open("own", "a") as file:
        print(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, file=file)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            note(os.getpid())
            time.sleep(1000)
        os._exit(0)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        sys.exit()
    for batch in DataLoader(Data(), batch_size=4, num_workers=2):
        pass
"""


@pytest.mark.parametrize("how", ["stop", "restart", "SIGTERM"])
def test_script_when_it_is_ended_then_none_of_its_processes_is_left(how, prewarmed, tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(LEAVES).replace("\\\\n", "\\n"))
    policy = ("--on-hang", how, "--hang-after", 2) if how != "SIGTERM" else ()
    restarts = ("--max-restarts", 1) if how == "restart" else ()
    run = prewarmed.start(
        tmp_path, "run", "--nproc", 2, "--threads", 1, "--name", "run", *policy, *restarts, "script.py"
    )
    pids = tmp_path / "pids"
    # of each rank: a program, a grandchild, two loader processes
    run.wait_for(lambda: pids.is_file() and pids.read_text().count("\n") >= 8, "its processes")
    first = [int(pid) for pid in pids.read_text().split()[:8]]
    if how == "SIGTERM":
        os.kill(run.pid, signal.SIGTERM)
    wait_until(lambda: run.code is not None, "its end")
    left = [pid for pid in first if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    later = [int(pid) for pid in pids.read_text().split()[8:]]
    for pid in (*left, *later):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    own = [int(pid) for pid in (tmp_path / "own").read_text().split()]
    are_there = [psutil.pid_exists(pid) for pid in own]
    for pid in own:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.kill_all()
    assert left == []
    assert all(are_there)  # in a session of its own a program may be there for others


def test_script_when_a_rank_is_slow_then_is_told_of_once_and_waited_for(prewarmed, tmp_path):
    run = run_script(prewarmed, tmp_path, 3)  # it would be told again after twice the time
    assert run.code == 0, run.err
    assert run.err.count("no step has finished for") == 1
    assert [path.name for path in (tmp_path / "runs" / "run" / "logs").glob("hang-*")] == ["hang-1.json"]
    assert run.out.count("all five steps") == 2
