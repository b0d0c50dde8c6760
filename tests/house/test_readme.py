"""The README's task is a task, its picture is of the demo, and its figures are those of the results.

It is short enough for a reader who decides in two minutes.
"""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/images/run.svg"
RESULTS = ROOT / "benchmarks/results"
MOST_LINES = 150
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


def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_when_it_tells_of_resuming_then_it_says_whose_code_runs() -> None:
    text = " ".join(readme().split())
    assert "`--resume` and `dure eval` run the task's file that the run's record names." in text
    assert "`--trust-task` ([why](docs/run-folder.md#resuming-runs-code))" in text


def cells(label: str) -> list[str]:
    """Return the cells of a row of the README's comparison."""
    (row,) = re.findall(rf"^\| \[?{re.escape(label)}\b.*$", readme(), re.MULTILINE)
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def test_readme_when_measured_then_it_is_short() -> None:
    assert len(readme().splitlines()) <= MOST_LINES


@pytest.mark.parametrize(("label", "part"), [("Step, one process", "steps1"), ("Step, DDP on 2 processes", "steps2")])
def test_readme_when_it_compares_steps_then_the_ratios_are_the_results(label: str, part: str) -> None:
    ratios = {row["name"]: row["ratio"] for row in result("overhead")["parts"][part]["rows"]}
    names = ("dure", "by hand", "Accelerate", "Lightning Fabric")
    assert [float(cell) for cell in cells(label)] == [round(ratios[name], 2) for name in names]


@pytest.mark.parametrize(("name", "model"), [("resnet50_gpu", "ResNet-50"), ("transformer_gpu", "a GPT")])
def test_readme_when_it_tells_speeds_on_a_gpu_then_they_are_the_results(name: str, model: str) -> None:
    ratios = {row["name"]: row["ratio"] for row in result(name)["rows"]}
    found = re.findall(rf"\[{model}\]\(benchmarks/results/{name}\.md\) at ([\d.]+)", readme())
    assert found == [f"{ratios['dure']:.2f}"]


def test_readme_when_it_compares_starts_then_the_seconds_are_the_results() -> None:
    seconds = {row["name"]: row["median"] for row in result("overhead")["parts"]["startup"]["rows"]}
    assert cells("Shell to first step")[:2] == [f"{seconds[name]:.1f} s" for name in ("dure", "by hand under torchrun")]


@pytest.mark.parametrize(("column", "name", "form"), [(0, "dure", ".2f"), (1, "torchrun", ".1f")])
def test_readme_when_it_compares_kills_then_the_figures_are_the_results(column: int, name: str, form: str) -> None:
    kills = result("recovery")[name]
    resumed = [kill for kill in kills if kill["seconds"] is not None]
    pause = format(statistics.median(kill["seconds"] for kill in resumed), form)
    step = max(kill["redone"] for kill in resumed)
    said = f"{len(resumed)} of {len(kills)} resumed, after {pause} s, up to {step} step{'s' * (step != 1)} repeated"
    assert cells("A killed rank")[column] == said


def test_readme_when_it_counts_hangs_then_the_counts_are_the_results() -> None:
    faults = result("hang_corpus")["cases"]
    slow = [fault for name, fault in faults.items() if name.endswith("-slow")]
    hung = [fault for name, fault in faults.items() if not name.endswith("-slow")]
    right, alone = hung.count(""), slow.count("")
    expected = f"right rank and line in {right} of {len(hung)}; {alone} of {len(slow)} slow runs left alone"
    assert cells("A hang")[0] == expected


def test_readme_when_it_counts_what_works_then_the_page_has_so_many_cells() -> None:
    page = (ROOT / "docs/what-works.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("|")]
    (least,) = re.findall(r"over ([\d,]+) cases tested", cells("Weights on N ranks")[0])
    assert sum(len(re.findall("[✓≈✗]", row)) for row in rows) > int(least.replace(",", ""))
