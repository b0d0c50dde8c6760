"""`dure lint`: what is printed, and how it ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dure.cli import main
from tests.scripts.lint.projects import START, script

FAULTY = script("loader = DataLoader(data, shuffle=True, sampler=DistributedSampler(data))\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "train.py").write_text(FAULTY)
    (tmp_path / "clean.py").write_text("x = 1\n")
    return tmp_path


def test_lint_when_nothing_is_found_then_it_says_so_and_ends_with_0(folder, capsys) -> None:
    assert main(["lint", "clean.py"]) == 0
    assert capsys.readouterr().out == "nothing found in 1 file, as far as the source tells\n"
    assert main(["lint", "clean.py", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": 1, "files": 1, "findings": [], "unreadable": []}


def test_lint_when_something_is_found_then_place_effect_and_diff_are_shown(folder, capsys) -> None:
    assert main(["lint"]) == 4
    shown = capsys.readouterr()
    assert "train.py:10: error DURE102\n  torch refuses a loader" in shown.out
    assert "\n  -loader = DataLoader(data, shuffle=True," in shown.out
    assert "\n  +loader = DataLoader(data, shuffle=False," in shown.out
    assert shown.err == "dure: 1 finding in 1 file: 1 error\n"


def test_lint_when_json_is_asked_for_then_each_finding_has_its_fields(folder, capsys) -> None:
    assert main(["lint", "train.py", "--json"]) == 4
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert {"file": "train.py", "line": 10, "rule": "DURE102"}.items() <= finding.items()
    assert finding["what"].startswith("torch refuses")
    assert finding["fix"].startswith("--- a/train.py\n+++ b/train.py\n@@ ")


@pytest.mark.parametrize(
    ("name", "fail_on", "code"),
    [("train.py", "never", 0), ("train.py", "error", 4), ("note.py", "warning", 0), ("note.py", "note", 4)],
)
def test_lint_when_it_is_told_what_to_fail_on_then_lighter_findings_pass(folder, name, fail_on, code) -> None:
    (folder / "note.py").write_text(START + "train()\n")
    assert main(["lint", name, "--fail-on", fail_on]) == code


def test_lint_when_it_fixes_then_what_is_left_has_its_reason(folder, capsys) -> None:
    (folder / "train.py").write_text(FAULTY + "dist.barrier() if rank == 0 else None\n")
    assert main(["lint", "train.py", "--fix"]) == 4
    out = capsys.readouterr().out
    assert "\n  fixed\n" in out
    assert "not fixed: it has no diff" in out
    assert "shuffle=False" in (folder / "train.py").read_text()
    (folder / "train.py").write_text(FAULTY)
    assert main(["lint", "train.py", "--fix", "--json"]) == 0
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["is_fixed"] is True


def test_lint_when_sarif_is_asked_for_then_it_is_one_document(folder, capsys) -> None:
    assert main(["lint", "--sarif"]) == 4
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert [result["ruleId"] for result in run["results"]] == ["DURE102"]
    assert main(["lint", "--sarif", "--json"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.py"], "there is no none.py"),
        (["bad.py"], "bad.py, line 1: not Python 3"),
        (["empty"], "empty has no Python files"),
        (["bad\x1b[31m.py"], r"there is no bad\x1b[31m.py"),
        (["clean.py", "--fail-on", "x"], "fail-on"),
    ],
)
def test_lint_when_it_cannot_read_then_one_sentence_says_so(folder, capsys, words, message) -> None:
    (folder / "bad.py").write_text("def f(:\n")
    (folder / "empty").mkdir()
    assert main(["lint", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_lint_when_a_folder_has_a_file_that_is_no_python_then_it_ends_with_2(folder, capsys) -> None:
    (folder / "bad.py").write_text("def f(:\n")
    assert main(["lint", "--fail-on", "never"]) == 2
    assert "bad.py, line 1: not Python 3" in capsys.readouterr().err


def test_lint_when_names_and_lines_have_control_characters_then_they_are_escaped(folder, capsys) -> None:
    comment = "  # \x1b]0;title\x07 \u202e"
    (folder / "x\x1b[2J\n.py").write_text(FAULTY.replace("(data))\n", f"(data)){comment}\n"), encoding="utf-8")
    main(["lint", "x\x1b[2J\n.py"])
    main(["lint"])
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    assert "\u202e" not in shown.out
    assert r"x\x1b[2J\x0a.py:10: error DURE102" in shown.out
    assert r"# \x1b]0;title\x07 \u202e" in shown.out


def test_lint_when_it_runs_then_torch_is_not_loaded(folder) -> None:
    code = "import dure.cli, sys; dure.cli.main(['lint', 'train.py']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
