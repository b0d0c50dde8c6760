"""Code that only a run's record names: it is not run unless it lies where the caller works, or the caller names it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dure
from dure.api.train import resolve_settings
from dure.cli import main
from dure.errors import RunInvalid, SpecInvalid
from dure.records.run_dir import RunDir
from tests.records.test_rundir import begin

TASK = """
from pathlib import Path
import dure
Path(__file__).with_suffix(".ran").touch()
class MyTask(dure.Task):
    def build_model(self): ...
    def train_data(self): ...
    def build_optimizer(self, model): ...
    def loss(self, model, batch): ...
"""


@pytest.fixture(autouse=True)
def own_modules() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - modules:
        if "task_evil" in name or name.startswith("runs"):
            del sys.modules[name]
    sys.path[:] = path


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.delenv("DURE_TRUST_TASK", raising=False)
    (tmp_path / "here/runs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    run = begin(Path("runs"), "x")
    (run.checkpoints / "samples-000000000004").mkdir()
    return run


def naming(run: RunDir, folder: Path, reference: str | None = None) -> Path:
    """Let the run's record name a task in a folder; return the file that shows that it was run."""
    file = folder / "evil.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(TASK, encoding="utf-8")
    record = run.read_json("spec.json")
    run.write_json("spec.json", {**record, "spec": {**record["spec"], "task": reference or f"{file}:MyTask"}})
    return file.with_suffix(".ran")


@pytest.mark.parametrize("place", ["elsewhere", "linked", "in the run", "in the run, as a module"])
def test_task_when_only_the_record_names_it_then_it_is_not_run(
    run: RunDir, tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = None
    folder = tmp_path / "there"
    if place == "linked":
        Path("link").symlink_to(folder)
        reference = "link/evil.py:MyTask"
    if place.startswith("in the run"):
        folder = run.path
        reference = "runs.x.evil:MyTask" if "module" in place else "runs/x/evil.py:MyTask"
    mark = naming(run, folder, reference)
    for words in (["train", "--resume", "runs/x"], ["eval", "runs/x"], ["train", "--resume", "runs/x", "--show-spec"]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "add --trust-task" in said
        assert ("came with the run's folder" in said) == place.startswith("in the run")
    assert main(["submit", "--to", "slurm", "--dry-run", "--", "--resume", "runs/x"]) == 2
    assert main(["submit", "--to", "slurm", "--dry-run", "--", "--resume", "runs/x", "--trust-task"]) == 0
    assert "--trust-task=true" in capsys.readouterr().out
    for call in (lambda: dure.train(resume=run.path), lambda: dure.evaluate(run.path)):
        with pytest.raises(RunInvalid, match="add trust_task=True"):
            call()
    for words in (["doctor", "runs/x"], ["diff", "runs/x", "runs/x"], ["export", "runs/x", "a.safetensors"], ["runs"]):
        main(words)
    assert not mark.exists()


def test_task_when_the_cure_is_followed_then_it_is_run(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = naming(run, tmp_path / "a b")
    with pytest.raises(RunInvalid, match=r"`dure train '.*/a b/evil\.py:MyTask' --resume runs/x`"):
        resolve_settings(resume=run.path)
    for number, ways in enumerate(({"trust_task": True}, {"task": f"{tmp_path}/a b/evil.py:MyTask"}, {})):
        if number == 2:
            monkeypatch.setenv("DURE_TASK", "../a b/evil.py:MyTask")
        sys.modules.pop("dure_task_evil", None)
        resolve_settings(resume=run.path, **ways)  # type: ignore[arg-type]
        assert mark.exists()
        mark.unlink()


def test_task_when_it_lies_in_the_current_folder_then_nothing_is_asked(run: RunDir) -> None:
    mark = naming(run, Path("tasks"))
    resolve_settings(resume=run.path)
    assert mark.exists()


def test_trust_when_the_record_claims_it_then_it_does_not_count(run: RunDir, tmp_path: Path) -> None:
    mark = naming(run, tmp_path / "there")
    record = json.loads((run.path / "spec.json").read_text(encoding="utf-8"))
    run.write_json("spec.json", {**record, "spec": {**record["spec"], "trust_task": True}})
    with pytest.raises(RunInvalid, match="lies outside the current folder"):
        resolve_settings(resume=run.path)
    assert not mark.exists()


def test_evaluation_when_another_task_is_named_then_it_is_refused(run: RunDir, tmp_path: Path) -> None:
    naming(run, tmp_path / "there")
    with pytest.raises(SpecInvalid, match="it is part of what the run is"):
        dure.evaluate(run.path, task="other.py:Other")
