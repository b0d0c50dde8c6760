"""Program in four forms: what its page says of each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import dure
from tests.conformance.cases import largest_difference, weights_of

ROOT = Path(__file__).parents[2]
FORMS = ROOT / "examples" / "four_forms"
PAGE = (ROOT / "docs" / "four-forms.md").read_text()


def command(*words: object, folder: Path, code: int = 0) -> str:
    """Return what a command of dure prints."""
    done = subprocess.run(
        [sys.executable, "-m", "dure", *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def findings(form: str, folder: Path) -> set[str]:
    shown = subprocess.run(
        [sys.executable, "-m", "dure", "lint", "--json", FORMS / form], cwd=folder, capture_output=True, text=True
    ).stdout
    return {finding["rule"] for finding in json.loads(shown)["findings"]}


def test_program_when_as_written_then_has_the_findings_of_the_page(tmp_path: Path) -> None:
    found = findings("as_written.py", tmp_path)
    assert len(found) >= 5
    assert found >= {word.strip(" |,") for word in PAGE.split() if word.startswith("DURE")}


@pytest.mark.parametrize("form", ["fixed.py", "wrapped.py", "task.py"])
def test_program_when_mended_then_has_no_finding(form: str, tmp_path: Path) -> None:
    assert findings(form, tmp_path) == set()


@pytest.mark.parametrize("form", ["as_written.py", "fixed.py", "wrapped.py", "task.py"])
def test_page_when_it_shows_code_then_it_is_in_the_file(form: str) -> None:
    section = next(part for part in PAGE.split("\n## ") if form in part.partition("\n\n")[2][:40])
    code = section.split("```python\n")[1].split("```")[0]
    assert code in (FORMS / form).read_text()


@pytest.mark.slow
def test_program_when_under_a_wrapper_then_prints_what_ddp_does(tmp_path: Path) -> None:
    fixed, wrapped = (
        command("run", "--nproc", 2, FORMS / f"{form}.py", folder=tmp_path) for form in ("fixed", "wrapped")
    )
    assert fixed == wrapped
    assert "epoch 2" in fixed


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fixed.py", "wrapped.py"])
def test_program_when_proven_then_is_equal(form: str, tmp_path: Path) -> None:
    command("prove", FORMS / form, folder=tmp_path)
    assert json.loads((tmp_path / "certificate.json").read_text())["verdict"] == "equal"


@pytest.mark.slow
def test_program_when_a_task_then_is_the_same_on_two_ranks(tmp_path: Path) -> None:
    runs = [
        dure.train(f"{FORMS / 'task.py'}:Digits", nproc=nproc, runs_dir=tmp_path, quiet=True).run for nproc in (1, 2)
    ]
    assert largest_difference(weights_of(Path(runs[0])), weights_of(Path(runs[1]))) < 1e-5
