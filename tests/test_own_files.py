"""Readers of a run's files, and links in its folder: none lets another file be written."""

import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import dure
from dure.cli import main
from dure.errors import RunInvalid
from dure.launch.logs.log_pump import LogFile
from dure.own_files import make_folder
from dure.records.events import Attempt
from dure.records.link_costs import write_costs
from dure.records.run_dir import RunDir
from dure.records.step_writer import RecordWriter
from dure.training.checkpoints.store import CheckpointStore
from tests.conformance.tasks import Regression
from tests.record_cases import step_lines


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Return the modes of a folder and of all that is in it."""
    return {str(path): stat.S_IMODE(path.lstat().st_mode) for path in (folder, *folder.rglob("*"))}


def test_run_when_it_is_trained_then_only_its_owner_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        summary = dure.train(
            Regression(), runs_dir=tmp_path / "runs", epochs=1, nproc=2, strategy="ddp", quiet=True, threads=1,
            record_samples=True, tensorboard=True,
        )  # fmt: skip
    finally:
        os.umask(before)
    found = modes(Path(summary.run))
    assert len(found) > 17
    assert {path: oct(mode) for path, mode in found.items() if mode & 0o077} == {}


@pytest.mark.parametrize("is_shared", [False, True])
def test_folder_when_it_is_made_then_its_files_are_as_readable_as_it_is(
    tmp_path: Path, umask: int, is_shared: bool
) -> None:
    run = RunDir.create(tmp_path, "x", is_shared=is_shared)
    run.write_json("summary.json", {})
    run.append_event(Attempt())
    RecordWriter(run.records_path(0)).close()
    os.close(LogFile(run.log_path(0)).descriptor)
    folder, file = (0o777 & ~umask, 0o666 & ~umask) if is_shared else (0o700, 0o600)
    for path, mode in modes(run.path).items():
        assert oct(mode) == oct(folder if Path(path).is_dir() else file), path


def test_script_when_its_run_is_shared_then_others_may_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text("")
    before = os.umask(0o022)
    try:
        assert main(["run", "--nproc", "1", "--name", "own", "a.py"]) == 0
        assert main(["run", "--nproc", "1", "--name", "shared", "--share-run", "a.py"]) == 0
    finally:
        os.umask(before)
    assert [stat.S_IMODE(Path("runs", name).stat().st_mode) for name in ("own", "shared")] == [0o700, 0o755]


def test_machine_record_when_it_is_written_then_only_its_owner_may_read_its_folder(tmp_path: Path, umask: int) -> None:
    write_costs(tmp_path / "dure/machine.json", [])
    assert set(modes(tmp_path / "dure").values()) == {0o700, 0o600}


LINE = step_lines(9)


def write_all(run: RunDir) -> None:
    """Write, in any order, what a run does not write anew."""
    (run.path / "rank1.jsonl").write_text(LINE)
    run.append_event(Attempt())
    run.undo_records_after(0)
    RecordWriter(run.records_path(0)).close()
    os.close(LogFile(run.log_path(0)).descriptor)
    with run.lock():
        pass


@pytest.mark.parametrize("name", ["events.jsonl", ".lock", "rank0.jsonl", "undone.jsonl", "logs/rank0.log"])
def test_link_when_it_is_in_a_files_place_then_its_target_is_not_written(tmp_path: Path, name: str) -> None:
    run = RunDir.create(tmp_path, "x")
    target = tmp_path / "target"
    target.write_text(LINE)
    (run.path / name).symlink_to(target)
    with pytest.raises((RunInvalid, OSError), match=r"it is a link|symbolic links"):
        write_all(run)
    assert target.read_text() == LINE


@pytest.mark.parametrize("name", ["logs", "checkpoints", "tensorboard", ".leader"])
def test_link_when_it_is_in_a_folders_place_then_the_run_does_not_go_on(tmp_path: Path, name: str) -> None:
    run, target = RunDir.create(tmp_path, "x"), tmp_path / "elsewhere"
    target.mkdir()
    (target / "failure-rank0.json").touch()
    shutil.rmtree(run.path / name, ignore_errors=True)
    (run.path / name).symlink_to(target)
    with pytest.raises(RunInvalid, match=f"{name} is a link, and a run is written into no folder that could lie"):
        run.forget_failures()
    with pytest.raises(RunInvalid, match=f"{name} is a link"), run.lock():
        pass
    with pytest.raises(OSError, match="it is a link"):
        make_folder(run.path / name, exist_ok=True)
    assert [path.name for path in target.iterdir()] == ["failure-rank0.json"]


def test_run_when_one_of_its_folders_was_replaced_by_a_link_then_every_writer_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    dure.train(Regression(), name="x", epochs=1, quiet=True, threads=1)
    Path("runs/x/checkpoints").rename("elsewhere")
    Path("runs/x/checkpoints").symlink_to(tmp_path / "elsewhere")
    before = sorted(Path("elsewhere").rglob("*"))
    for words in (["train", "--resume", "runs/x", "--epochs", "2"], ["eval", "runs/x"]):
        assert main([*words, "--trust-task"]) == 2
        assert "runs/x/checkpoints is a link, and a run" in capsys.readouterr().err
    assert sorted(Path("elsewhere").rglob("*")) == before


def test_run_when_its_whole_folder_is_a_link_then_it_goes_on(tmp_path: Path) -> None:
    first = dure.train(Regression(), runs_dir=tmp_path / "disk", name="x", epochs=1, quiet=True, threads=1)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/x").symlink_to(Path(first.run))
    summary = dure.train(Regression(), resume=tmp_path / "runs/x", epochs=2, quiet=True, threads=1)
    assert (summary.status, summary.samples) == ("completed", 2 * first.samples)


def test_link_when_it_is_in_a_records_place_then_it_is_replaced_and_not_followed(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    target = tmp_path / "target"
    for name in ("summary.json", f".summary.json.{os.getpid()}.tmp"):
        (run.path / name).symlink_to(target)
    with pytest.raises(RunInvalid, match="it is a link, which could lead anywhere"):
        run.write_json("summary.json", {"a": 1})
    run.write_json("summary.json", {"a": 1})  # what was in the way is gone
    assert not target.exists()
    assert json.loads((run.path / "summary.json").read_text()) == {"a": 1}


def test_link_when_it_is_in_a_checkpoints_place_then_it_goes_and_its_target_stays(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / "precious").touch()
    checkpoints = RunDir.create(tmp_path, "x").checkpoints
    store = CheckpointStore(checkpoints, 1, pytest.fail)
    for name in ("samples-000000000004", ".trash-samples-000000000004"):
        (checkpoints / name).symlink_to(target)
    store._remove(checkpoints / "samples-000000000004")
    store.remove_leftovers()
    assert (target / "precious").is_file()
    assert not (checkpoints / "samples-000000000004").exists()
