"""The run folder: names, atomic writes, tolerant reads, the lock, and the list of runs."""

import errno
import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from dure.errors import DiskFull, RunInvalid
from dure.records.events import Attempt, Warned
from dure.records.run_dir import SPEC, RunDir, check_name, default_name
from dure.records.run_list import list_runs
from dure.spec import resolve
from dure.strategies.table import STRATEGIES
from tests.record_cases import step_lines


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return begin(tmp_path, "x")


def begin(runs_dir: Path, name: str) -> RunDir:
    run = RunDir.create(runs_dir, name)
    flags = {"task": "a.py:T", "seed": 3, "nproc": 2}
    run.write_spec(resolve(flags=flags, environ={}, config=None, task_defaults={}, strategies=STRATEGIES))
    return run


# --- names and folders


@pytest.mark.parametrize("name", ["../x", "..", ".x", "a/b", "", "-x", "x" * 65, "x\n", "x y", "/tmp/x", "두레"])
def test_name_when_it_could_leave_the_folder_or_is_no_name_then_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RunInvalid, match="cannot name a run: use 1 to 64 letters"):
        RunDir.create(tmp_path / "runs", name)
    assert not (tmp_path / "runs").exists()


def test_create_when_new_then_has_its_folders(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "runs", "x")
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "logs"]


def test_create_when_the_name_is_taken_then_is_refused_with_both_cures(run: RunDir) -> None:
    with pytest.raises(RunInvalid, match=r"exists already: choose another --name, or continue .*--resume"):
        RunDir.create(run.path.parent, "x")


def killed_start(runs: Path) -> RunDir:
    """Create what a start leaves behind that is killed between the lock and the spec."""
    run = RunDir.create(runs, "x")
    with run.lock():
        (run.path / f".{SPEC}.123.tmp").write_text("{")
    return run


def test_open_when_its_start_was_killed_before_the_spec_then_says_to_start_again(tmp_path: Path) -> None:
    with pytest.raises(RunInvalid, match=r"no run yet: its start ended before spec\.json was written; start it again"):
        RunDir.open(killed_start(tmp_path).path)


def test_create_when_its_start_was_killed_before_the_spec_then_replaces_it(tmp_path: Path) -> None:
    killed_start(tmp_path)
    run = RunDir.create(tmp_path, "x")
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "logs"]


@pytest.mark.parametrize("reason", ["is starting", "has a log", "has a file", "was trained", "is of another host"])
def test_create_when_the_folder_may_hold_something_then_is_refused(tmp_path: Path, reason: str) -> None:
    run = killed_start(tmp_path)
    with run.lock() if reason == "is starting" else nullcontext():
        if reason == "has a log":
            run.log_path(0).write_text("x")
        elif reason == "has a file":
            (run.path / "mine.txt").write_text("x")
        elif reason == "was trained":
            run.append_event(Warned(message="x"))
        elif reason == "is of another host":
            run.append_event(Attempt(pid=1, host="another"))
        with pytest.raises(RunInvalid, match="exists already"):
            RunDir.create(tmp_path, "x")
    assert (run.path / "events.jsonl").is_file()


def test_create_when_numbered_then_default_names_of_one_second_differ(tmp_path: Path) -> None:
    names = [RunDir.create(tmp_path, "x" * 64, or_numbered=True).name for _ in range(3)]
    assert names == ["x" * 64, "x" * 59 + "-2", "x" * 59 + "-3"]


def test_create_when_a_file_is_in_the_way_then_says_so(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunInvalid, match="a file of that name is in the way"):
        RunDir.create(tmp_path / "runs", "x")


def test_default_name_when_made_then_has_date_task_and_strategy_and_is_a_name() -> None:
    name = default_name("/some/where.py:My_Task", "ddp", datetime(2026, 11, 20, 9, 5, 7))
    assert name == "2026-11-20_09-05-07_my-task_ddp"
    check_name(default_name("a:" + "Ü" * 100, "s" * 100, datetime(2026, 11, 20)))


@pytest.mark.parametrize(
    ("path", "what"), [("none", "does not exist"), ("folder", "is a folder that is no run"), ("file", "is a file, not")]
)
def test_open_when_it_is_no_run_then_says_what_it_is(tmp_path: Path, path: str, what: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(RunInvalid, match=what):
        RunDir.open(tmp_path / path)


def test_discard_when_a_step_was_taken_then_keeps_the_run(run: RunDir) -> None:
    run.records_path(0).write_text('{"step": 1}\n')
    run.discard()
    assert run.path.exists()
    run.records_path(0).write_text("")
    run.discard()
    assert not run.path.exists()


# --- records


def test_spec_when_written_and_read_then_is_the_same_with_its_sources(run: RunDir) -> None:
    spec = RunDir.open(run.path).read_spec()
    record = run.read_json("spec.json")
    assert (spec.seed, spec.nproc, spec.strategy) == (3, 2, "ddp")
    assert record["origin"]["seed"] == "flag --seed"
    assert "torch" in record["versions"]


@pytest.mark.parametrize(
    ("text", "what"), [("{", "is damaged"), ("[]", "does not hold a spec"), ('{"spec": {"seed": "x"}}', "task: ")]
)
def test_spec_when_damaged_then_is_refused_by_name(run: RunDir, text: str, what: str) -> None:
    (run.path / "spec.json").write_text(text)
    with pytest.raises(RunInvalid, match=rf"spec\.json.*{what}"):
        run.read_spec()


def test_write_json_when_it_cannot_finish_then_the_old_record_stays(run: RunDir) -> None:
    run.write_json("summary.json", {"a": 1})
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="Circular"):
        run.write_json("summary.json", loop)
    assert run.read_json("summary.json") == {"a": 1}
    assert not list(run.path.glob(".*.tmp"))


@pytest.mark.parametrize("is_run", [False, True])
def test_lock_when_the_disk_is_full_then_says_so_and_a_folder_that_is_no_run_yet_goes(
    is_run: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(tmp_path, "full") if is_run else RunDir.create(tmp_path, "full")

    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", no_space)
    with pytest.raises(DiskFull, match="the disk is full; free some space"), run.lock():
        pass
    assert run.path.exists() == is_run


def test_event_when_the_disk_is_full_then_says_so(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(DiskFull, match="the disk is full; free some space"):
        run.append_event(Warned(message="x"))


def test_event_when_the_disk_takes_only_a_part_of_it_then_this_is_an_error_and_the_next_one_is_whole(tmp_path):
    run = RunDir.create(tmp_path, "run")
    run.append_event(Warned(message="one"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((run.path / "events.jsonl").stat().st_size + 10, limits[1]))
    try:
        with pytest.raises(DiskFull, match=r"events\.jsonl cannot be written: the disk is full; .* `ulimit -f`"):
            run.append_event(Warned(message="two"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    run.append_event(Warned(message="three"))
    assert [event.message for event in run.events()] == ["one", "three"]


def test_events_when_a_crash_tore_a_line_then_the_others_are_read(run: RunDir) -> None:
    run.append_event(Warned(message="one"))
    with (run.path / "events.jsonl").open("a") as file:
        file.write('{"time": 3, "eve')
    run.append_event(Warned(message="two"))
    assert [event.message for event in run.events()] == ["one", "two"]


def test_records_when_the_last_line_is_torn_then_the_others_are_read(run: RunDir) -> None:
    run.records_path(1).write_text(f'{step_lines(32, 48)}{{"st')
    assert [record.step for record in run.records(1)] == [1, 2]
    assert list(run.records(2)) == []


# --- the lock


def _hold(path: Path, pipe: Connection) -> None:
    with RunDir(path).lock():
        pipe.send(os.getpid())
        signal.pause()


@pytest.fixture
def holder(run: RunDir) -> Iterator[multiprocessing.process.BaseProcess]:
    """Start another process that holds the run."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_hold, args=(run.path, there))
    process.start()
    here.recv()
    yield process
    process.kill()
    process.join()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_lock_when_held_elsewhere_then_is_refused_with_the_pid(
    run: RunDir, holder: multiprocessing.process.BaseProcess
) -> None:
    assert run.is_active()
    with pytest.raises(RunInvalid, match=f"is being trained by process {holder.pid}: wait for it"), run.lock():
        pass


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_lock_when_its_holder_is_killed_then_is_free(run: RunDir, holder: multiprocessing.process.BaseProcess) -> None:
    holder.kill()
    holder.join()
    assert not run.is_active()
    with run.lock():
        assert run.is_active()
    assert not run.is_active()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_lock_when_a_forked_child_unwinds_through_it_then_the_parent_still_holds_it(run: RunDir) -> None:
    lock = run.lock()
    with lock:
        pid = os.fork()
        if pid == 0:
            lock.__exit__(None, None, None)
            os._exit(0)
        os.waitpid(pid, 0)
        assert run.is_active()


# --- the list of runs


def test_way_on_when_there_is_no_checkpoint_yet_then_says_that_it_starts_again(run: RunDir) -> None:
    again = f"`dure train --resume {run.path}`"
    assert run.how_to_go_on() == f"{again} starts from the beginning: there is no checkpoint yet"
    (run.checkpoints / "samples-000000000064").mkdir(parents=True)
    assert run.how_to_go_on() == f"{again} goes on from the last good checkpoint"


def test_list_when_runs_ended_differently_then_says_how(tmp_path: Path) -> None:
    for name, status in (("a", "completed"), ("b", "interrupted"), ("c", "failed")):
        begin(tmp_path, name).write_json("summary.json", {"status": status, "samples": 64, "world_size": 2})
    begin(tmp_path, "d").records_path(0).write_text(f'{step_lines(32, 48)}{{"sam')
    (begin(tmp_path, "e").path / "spec.json").write_text("{")
    (tmp_path / "no-run").mkdir()
    seen = [(run.name, run.status, run.samples) for run in list_runs(tmp_path)]
    assert seen == [
        ("a", "completed", 64),
        ("b", "interrupted", 64),
        ("c", "failed", 64),
        ("d", "died", 48),
        ("e", "unreadable", None),
    ]


def test_status_when_a_resumed_run_is_killed_then_its_old_summary_is_not_believed(run: RunDir) -> None:
    run.write_json("summary.json", {"status": "interrupted", "samples": 64})
    os.utime(run.path / "summary.json", (1, 1))
    with run.lock():
        assert list_runs(run.path.parent)[0].status == "running"
    assert list_runs(run.path.parent)[0].status == "died"
    run.write_json("summary.json", {"status": "completed", "samples": 128})
    assert list_runs(run.path.parent)[0].status == "completed"


def test_status_when_file_times_say_otherwise_then_a_summary_counts_for_the_attempt_that_it_ended(run: RunDir) -> None:
    run.append_event(Attempt(time=time.time() + 3600))  # the clock is set back during the attempt
    run.write_end({"status": "failed"})
    os.utime(run.path / "summary.json", (1, 1))
    assert list_runs(run.path.parent)[0].status == "failed"
    with run.lock():
        pass
    os.utime(run.path / "summary.json", (2**32, 2**32))  # as in a copy of the folder
    assert list_runs(run.path.parent)[0].status == "died"
    run.write_end({"status": "completed"})
    assert list_runs(run.path.parent)[0].status == "completed"


def test_list_when_summary_is_no_object_then_is_unreadable(run: RunDir) -> None:
    (run.path / "summary.json").write_text(json.dumps([1]))
    assert list_runs(run.path.parent)[0].status == "unreadable"
