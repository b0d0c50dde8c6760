"""The supervisor over ranks that need no torch: ends, signals, nothing left."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from dure.launch.nodes.peers import Nodes
from dure.launch.rounds import supervisor
from dure.launch.rounds.outcome import Outcome
from dure.launch.rounds.request import Launch
from dure.launch.rounds.start_rank import start_worker
from dure.launch.rounds.stop_limit import StopLimit
from dure.launch.rounds.supervisor import run_workers
from dure.launch.worker.child import Output
from dure.launch.worker.worker_process import Worker, unnamed_file
from dure.process import stop_signals
from dure.process.heartbeat import Heartbeats
from dure.process.jobs import ScriptJob
from dure.process.round_orders import Restart, RoundPlan
from tests.commands import wait_until
from tests.record_cases import failure_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(params=["fork", "spawn"])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(ROOT)  # a spawned worker finds the entry from there
    return request.param


def launch(
    folder: Path,
    start: str,
    deeds: list,
    expendable: tuple[int, ...] = (),
    *,
    serves_store: bool = False,
    is_interrupted: bool = False,
) -> Outcome:
    folder.mkdir(exist_ok=True)
    return run_workers(
        Launch(
            entry="tests.launch.rounds.toy_entry",
            job=ScriptJob(script=str(folder), arguments=tuple(map(str, deeds)), is_module=is_interrupted, run="test"),
            nodes=Nodes.alone(len(deeds)),
            threads=1,
            output_of=lambda rank: Output(log=str(folder / f"log{rank}")),
            store_prefix="test",
            start=start,
            expendable=expendable,
            serves_store=serves_store,
        )
    )


def codes(outcome: Outcome) -> list[int]:
    return [end.exit_code for end in outcome.ends]


def test_ranks_when_all_end_then_their_codes_come_back(tmp_path, start):
    assert codes(launch(tmp_path, start, [0, 0, 0])) == [0, 0, 0]
    told = json.loads((tmp_path / "told-1").read_text())
    assert told["store"] == "127.0.0.1"
    assert not any("parent_pid" in word for word in told["argv"])
    assert told["obeys_ctrl_z"]  # by itself: a copy of the supervisor's handler would stop the other ranks


@pytest.mark.alone
def test_ranks_when_one_fails_then_the_others_are_gone_within_two_seconds(tmp_path, start):
    began = time.monotonic()
    outcome = launch(tmp_path, start, ["ignore", "raise", "ignore"])
    fastest_start = 0 if start == "fork" else 5  # three interpreters on busy cores
    assert time.monotonic() - began < 2 + fastest_start
    assert codes(outcome) == [-signal.SIGKILL, 1, -signal.SIGKILL]
    assert [end.was_stopped for end in outcome.ends] == [True, False, True]
    assert "RuntimeError: planned" in (tmp_path / "log1").read_text()


def test_rank_that_can_be_missed_when_killed_then_the_others_go_on(tmp_path, start):
    outcome = launch(tmp_path, start, ["linger", "train and be killed", "linger"], expendable=(1,))
    assert codes(outcome) == [0, -signal.SIGKILL, 0]
    assert [end.is_tolerated for end in outcome.ends] == [False, True, False]


def test_rank_that_can_be_missed_when_killed_before_it_trains_then_the_others_are_ended(tmp_path):
    outcome = launch(tmp_path, "fork", ["linger", "kill"], expendable=(1,))
    assert outcome.ends[0].was_stopped
    assert not outcome.ends[1].is_tolerated


@pytest.mark.parametrize("deed", ["raise", "report", 3])
def test_rank_that_can_be_missed_when_it_ends_by_itself_then_the_others_are_ended(deed, tmp_path):
    outcome = launch(tmp_path, "fork", ["linger", deed], expendable=(1,))
    assert outcome.ends[0].was_stopped
    assert not outcome.ends[1].is_tolerated


def test_rank_when_it_fails_then_its_report_reaches_the_supervisor(tmp_path, start):
    assert launch(tmp_path, start, [0, "report"]).ends[1].failure == failure_of(1, message="told")


def test_rank_when_its_report_is_no_failure_then_it_left_none(tmp_path, start):
    assert launch(tmp_path, start, [0, "report nonsense"]).ends[1].failure is None


def test_signal_when_it_reaches_the_supervisor_then_every_rank_gets_it(tmp_path, start):
    outcome = launch(tmp_path, start, ["wait", "wait", "signal_parent"])
    assert codes(outcome) == [130, 130, 130]
    assert outcome.signal == signal.SIGINT


def test_signal_when_a_second_one_comes_then_ranks_end_at_once(tmp_path, start, monkeypatch):
    monkeypatch.setattr(stop_signals, "ONE_WISH_SECONDS", 0.0)
    outcome = launch(tmp_path, start, ["ignore", "signal_parent_twice"])
    assert codes(outcome) == [-signal.SIGKILL, -signal.SIGKILL]
    assert all(end.was_stopped for end in outcome.ends)
    assert outcome.signal == signal.SIGTERM


def test_signal_when_it_comes_twice_at_once_then_ranks_end_in_order(tmp_path, start):
    outcome = launch(tmp_path, start, ["wait", "signal_parent_twice_and_wait"])  # as `timeout` sends it
    assert codes(outcome) == [143, 143]
    assert outcome.signal == signal.SIGTERM


def test_signal_when_slurm_says_it_again_then_ranks_end_in_order(tmp_path, start, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setattr(stop_signals, "ONE_WISH_SECONDS", 0.0)
    outcome = launch(tmp_path, start, ["wait", "signal_parent_twice_and_wait"])
    assert codes(outcome) == [143, 143]
    assert outcome.signal == signal.SIGTERM


@pytest.mark.parametrize("told_at", [0, 1])
def test_signal_when_another_thread_gets_it_while_a_rank_starts_then_every_rank_gets_it(told_at, tmp_path, monkeypatch):
    def start_and_be_told(launch: Launch, rank: int, *more: Any, **named: Any) -> Worker:
        worker = start_worker(launch, rank, *more, **named)
        wait_until((tmp_path / f"told-{rank}").is_file, "the rank")
        if rank == told_at:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)  # the other thread has to run
        return worker

    monkeypatch.setattr("dure.launch.rounds.round.start_worker", start_and_be_told)
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    thread.start()
    try:
        outcome = launch(tmp_path, "fork", ["wait", "wait"])
    finally:
        is_over.set()
        thread.join()
    assert codes(outcome) == [143, 143]


def test_signal_when_it_comes_while_the_store_is_started_then_that_ends_too(tmp_path, monkeypatch):
    deeds: list[str] = []

    class Server:
        def __init__(self, *_: object, **__: object) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            deeds.append("started")

        def close(self) -> None:
            deeds.append("ended")

    monkeypatch.setattr("dure.launch.rounds.round.StoreServer", Server)
    outcome = launch(tmp_path, "fork", ["wait"], serves_store=True)
    assert outcome.signal == signal.SIGTERM
    assert deeds == ["started", "ended"]


def test_signal_when_no_rank_is_started_yet_then_none_is(tmp_path):
    outcome = launch(tmp_path, "fork", [0, 0], is_interrupted=True)
    assert (outcome.ends, outcome.signal) == ([], signal.SIGTERM)
    assert not list(tmp_path.glob("started-*"))


def then_signal(module: object, name: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let a stop signal come at the end of a function; return the list of what it returns."""
    function, results = getattr(module, name), []

    def call_and_signal(*arguments: Any) -> Any:
        results.append(function(*arguments))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)  # Python calls the handler before the next function begins
        return results[-1]

    monkeypatch.setattr(module, name, call_and_signal)
    return results


@pytest.mark.parametrize("moment", [(supervisor, "listening_on"), (Nodes, "open_round")], ids=["bound", "told"])
def test_signal_when_the_store_is_bound_and_no_rank_is_started_then_its_socket_is_closed(moment, tmp_path, monkeypatch):
    sockets, bind = [], supervisor.listening_on

    def bind_and_keep(host: str) -> socket.socket:
        sockets.append(bind(host))
        return sockets[-1]

    monkeypatch.setattr(supervisor, "listening_on", bind_and_keep)
    then_signal(*moment, monkeypatch)
    outcome = launch(tmp_path, "fork", [0, 0])
    assert (outcome.ends, outcome.signal) == ([], signal.SIGTERM)
    assert [one.fileno() for one in sockets] == [-1]


def test_signal_when_it_comes_before_the_rounds_then_the_memory_of_ranks_is_given_back(tmp_path, monkeypatch):
    memories = then_signal(supervisor, "SurvivingMemory", monkeypatch)
    outcome = launch(tmp_path, "fork", [0, 0])
    assert (outcome.ends, outcome.signal) == ([], signal.SIGTERM)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(memories[0].heartbeat_fd)


def test_signal_when_a_second_one_comes_before_any_rank_then_the_run_is_stopped_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(stop_signals, "ONE_WISH_SECONDS", 0.0)
    then_signal(supervisor, "kill_all", monkeypatch)
    outcome = launch(tmp_path, "fork", [0, 0], is_interrupted=True)
    assert (outcome.ends, outcome.signal) == ([], signal.SIGTERM)


def test_stop_limit_when_the_run_stood_still_then_ranks_have_the_rest_of_their_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("dure.launch.rounds.stop_limit.time.monotonic", lambda: now[0])
    job = ScriptJob(script="train.py", run="test")
    request = Launch(entry="", job=job, nodes=Nodes.alone(1), threads=1, store_prefix="test", start="fork")
    memory = unnamed_file("test")
    stop = StopLimit(request, Heartbeats(memory, 1))
    os.close(memory)
    assert stop.seconds_left([0]) == 30.0
    now[0] += 1001.0
    stop.extend(1000.0)
    assert stop.seconds_left([0]) == 29.0


def test_handlers_when_the_ranks_are_gone_then_the_callers_are_back(tmp_path):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
    launch(tmp_path, "fork", [0])
    assert {number: signal.getsignal(number) for number in before} == before


def test_supervisor_when_it_is_killed_then_no_rank_outlives_it(tmp_path, start):
    code = (
        "from tests.launch.rounds.test_supervisor import launch; from pathlib import Path;"
        f"launch(Path({str(tmp_path)!r}), {start!r}, ['ignore', 'ignore'])"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as supervisor:
        files = [tmp_path / f"started-{rank}" for rank in range(2)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), "two ranks")
        pids = [int(file.read_text()) for file in files]
        supervisor.kill()
    wait_until(lambda: not any(_lives(pid) for pid in pids), "the ranks' end", 2)


def told(*decided, has_begun):
    """Return what the next round is told after some restarts; in the last round a rank had begun a step, or none."""
    plan = RoundPlan()
    for restart in decided:
        plan = plan.after_round(has_begun=has_begun).after_restart(restart)
    return plan.orders.microbatch_size, plan.orders.trusted_samples


@pytest.mark.parametrize(
    ("decided", "has_begun", "answer"),
    [
        ([{}], True, (None, None)),
        ([{"microbatch_sizes": (8, 4)}, {"microbatch_sizes": (4, 2)}, {}], True, (2, None)),
        ([{"go_back_to": 32}], True, (None, 32)),
        # killed again before all have forgotten what is not to be trusted
        ([{"go_back_to": 32}, {}], False, (None, 32)),
        ([{"go_back_to": 32}, {}], True, (None, None)),
        ([{"go_back_to": 32}, {"microbatch_sizes": (8, 4)}], False, (4, 32)),
    ],
)
def test_round_when_it_follows_restarts_then_it_is_told_what_still_holds(decided, has_begun, answer):
    restarts = [Restart(number=1, rank=0, step=5, cause="-", **more) for more in decided]
    assert told(*restarts, has_begun=has_begun) == answer


def test_round_when_another_was_healthy_since_all_agreed_then_what_it_left_is_trusted():
    healed = RoundPlan().after_restart(Restart(number=1, rank=0, step=5, cause="-", go_back_to=32))
    before, after = (healed.after_round(has_begun=has_begun) for has_begun in (False, True))
    assert (before.orders.trusted_samples, after.orders.trusted_samples) == (32, None)
    assert before.after_change("a node came").orders.trusted_samples == 32
    assert after.after_change("a node came").orders.trusted_samples is None
    assert after.stopped_by(15).orders.trusted_samples is None


def test_descriptors_when_a_thousand_are_open_then_ranks_are_still_watched(tmp_path):
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert codes(launch(tmp_path, "fork", [0, 0])) == [0, 0]
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_children_when_the_caller_ignores_their_ends_then_codes_still_come_back(tmp_path):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert codes(launch(tmp_path, "fork", [5])) == [5]
    finally:
        signal.signal(signal.SIGCHLD, before)


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
