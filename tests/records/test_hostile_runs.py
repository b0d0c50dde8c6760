"""Run folders that nobody should have written: one sentence each, and the other runs are listed all the same."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dure.cli import main
from dure.records.events import Attempt
from dure.records.run_dir import RunDir
from tests.records.test_rundir import begin

DEEP = "[" * 200_000 + "]" * 200_000
STEP = {
    "time": 1.0, "step": 1, "epoch": 0, "samples_seen": 4, "loss_sum": 1.0, "loss_count": 4, "data_seconds": 0.1,
    "forward_backward_seconds": 0.1, "sync_seconds": 0.1, "optimizer_seconds": 0.1, "wall_seconds": 1.0,
    "sent_bytes": 0,
}  # fmt: skip
SUMMARY = {"status": "failed", "strategy": "ddp", "world_size": 2, "num_devices": 2, "samples": 4, "best": None}
FIELDS = ("status", "strategy", "world_size", "num_devices", "samples", "best", "message")
VALUES: tuple[Any, ...] = (
    None, True, -1, 1.5, 10**400, float("nan"), float("inf"), "x", "\ud800", [], {}, [[1]], {"value": 10**400},
    {"samples_seen": "x"}, {"metric": {}, "value": [1], "samples_seen": 3.5}, "\x1b]0;owned\x07\n[red]",
)  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("bad", "good"):
        run = begin(tmp_path / "runs", name)
        run.append_event(Attempt(pid=1, host="x"))
        run.write_json("summary.json", SUMMARY)
        run.records_path(0).write_text(json.dumps(STEP) + "\n", encoding="utf-8")
    return tmp_path / "runs"


def in_file(name: str, text: str | bytes) -> Callable[[Path], Any]:
    data = text if isinstance(text, bytes) else text.encode()
    return lambda run: (run / name).write_bytes(data)


def in_place_of(name: str, make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def damage(run: Path) -> None:
        (run / name).unlink()
        make(run / name)

    return damage


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


WRONG = [DEEP, b"\xff\xfe", "3", "[]", "null", '"x"', "{}", '{"status": 1, "status": 2}', "1" * 5000, '{"spec": []}']
DAMAGES = {
    **{f"{name} {n}": in_file(name, text) for name in ("summary.json", "spec.json") for n, text in enumerate(WRONG)},
    **{f"task_object {n}": in_file("spec.json", json.dumps({"spec": {"task": "a:T"}, "task_object": value}))
       for n, value in enumerate((1, "x", [], {}, {"because": 1, "attributes": 3}))},
    **{f"{name} large": in_place_of(name, large) for name in ("summary.json", "spec.json")},
    "summary.json pipe": in_place_of("summary.json", os.mkfifo),
    "summary.json endless": in_place_of("summary.json", endless),
    "logs": lambda run: ((run / "logs/hang-x.json").write_text(DEEP), (run / "logs/hang-1.json").write_text(DEEP)),
    "failure": in_file("logs/failure-rank0.json", DEEP),
    **{f"events {n}": in_file("events.jsonl", text + "\n") for n, text in enumerate([
        DEEP, "{}", '{"event": "restart", "time": 1}', '{"event": "attempt", "time": "x"}', '{"event": 3, "time": 1}',
        '{"event": "attempt", "time": NaN, "pid": [], "host": {}}', '{"event": "rank_lost", "time": 1, "shares": 3}',
        '{"event": "attempt", "time": 1e999}', '{"event": "step_skipped", "time": 1}',
    ])},
    **{f"records {n}": in_file("rank0.jsonl", text + "\n") for n, text in enumerate([
        DEEP, "{}", '{"step": "x", "samples_seen": []}', '{"step": NaN, "samples_seen": NaN, "time": 1e999}',
    ])},
    "rank's number": in_file("rankx.jsonl", '{"step": 1, "samples_seen": 1, "time": 1}\n'),
}  # fmt: skip


def spoken(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(list(words))
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return code, out + err


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_run_when_it_is_damaged_then_every_command_says_so_and_the_others_are_listed(
    runs: Path, damage: Callable[[Path], Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent)
    damage(runs / "bad")
    code, said = spoken(capsys, "runs")
    assert (code, said.count("good")) == (0, 1)
    assert spoken(capsys, "doctor", "runs/bad")[0] in (0, 2)
    assert spoken(capsys, "diff", "runs/bad", "runs/good")[0] in (0, 2, 4)
    for words in (["eval", "runs/bad"], ["export", "runs/bad", "x.safetensors"]):
        assert spoken(capsys, *words)[0] == 2


@pytest.mark.parametrize("field", FIELDS)
def test_summary_when_a_field_is_of_another_type_then_the_run_is_one_line(
    runs: Path, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, value in enumerate(VALUES):
        text = json.dumps({**SUMMARY, field: value})
        run = begin(runs, f"bad-{number}")
        run.append_event(Attempt(pid=1, host="x"))
        (run.path / "summary.json").write_text(text, encoding="utf-8")
        assert spoken(capsys, "doctor", str(run.path))[0] == 0, text
    for words in (["runs", "--runs-dir", str(runs)], ["runs", "--runs-dir", str(runs), "--json"]):
        code, said = spoken(capsys, *words)
        assert code == 0
        assert "\x1b" not in said
        assert all(f"bad-{number}" in said for number in range(len(VALUES)))


def test_runs_when_one_is_damaged_then_says_what_is_wrong_with_it(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "bad/summary.json").write_text(DEEP, encoding="utf-8")
    _, said = spoken(capsys, "runs", "--runs-dir", str(runs))
    assert "summary.json is damaged (it is nested more than 100 deep): restore it from a copy of the run" in " ".join(
        said.split()
    )


def test_runs_when_a_folders_name_would_steer_the_terminal_then_it_is_written_out(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "bad").rename(runs / "a\x1b]0;owned\x07\ndure: all is well [red]x")
    code, said = spoken(capsys, "runs", "--runs-dir", str(runs))
    assert code == 0
    assert "a\\x1b]0;owned\\x07\\x0adure: all is well [red]x" in said


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_runs_when_one_is_anothers_then_it_is_one_line(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "bad").chmod(0)
    code, said = spoken(capsys, "runs", "--runs-dir", str(runs))
    (runs / "bad").chmod(0o700)
    assert code == 0
    assert "cannot be read: Permission denied" in said


@pytest.mark.parametrize("words", [["diff", "runs/bad", "runs/good"], ["runs"], ["doctor", "runs/bad"]])
def test_command_when_a_file_is_anothers_then_one_sentence_says_so(
    words: list[str], runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.chdir(runs.parent)
    monkeypatch.setattr(Path, "iterdir", refuse)  # as root may read everything
    monkeypatch.setattr("dure.records.run_dir.read_lines", refuse)
    code, said = spoken(capsys, *words)
    assert code == 2
    assert said.startswith("dure: runs")
    assert said.endswith("Permission denied\n")


def test_record_when_a_name_is_no_unicode_then_it_is_kept(tmp_path: Path) -> None:
    run = begin(tmp_path, "x")
    run.write_json("summary.json", {"name": "a\udc80\ud800두레"})
    assert run.read_json("summary.json") == {"name": "a\udc80\ud800두레"}
    assert RunDir.open(run.path).path == run.path


def test_runs_when_the_lock_of_one_is_a_pipe_then_nobody_waits(tmp_path):
    (tmp_path / "piped").mkdir()
    os.mkfifo(tmp_path / "piped/.lock")
    (tmp_path / "piped/spec.json").write_text("{}")
    assert RunDir.open(tmp_path / "piped").is_active() is False
