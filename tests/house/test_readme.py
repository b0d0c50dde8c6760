"""The README's task is a task, and its picture is of the demo."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/images/run.svg"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_readme_when_its_task_is_trained_then_it_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn", reason="the digits extra is not installed")
    import dure

    task = tmp_path / "train.py"
    task.write_text(BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))[0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    summary = dure.train(f"{task}:MyTask", epochs=3, seed=21, start="inline", threads=1, quiet=True)
    assert summary.status == "completed"
    assert summary.metrics["accuracy"].count == len(dure.data.digits(train=False))
    assert summary.metrics["accuracy"].value > 0.8


def test_picture_when_compared_then_it_shows_the_command_of_the_demo() -> None:
    (command,) = re.findall(
        r"^demo:.*\n\t\$\(PY\) -m (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    shown = PICTURE.read_text(encoding="utf-8").replace("&#160;", " ")
    assert f"$ {command}<" in shown
    assert "docs/images/run.svg" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_picture_when_a_page_shows_it_then_it_loads_nothing() -> None:
    text = PICTURE.read_text(encoding="utf-8").replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert re.findall(r"https?:|@import|url\((?!#)", text) == []
