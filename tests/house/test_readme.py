"""The README's task is a task."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
