"""The public names, and what importing them costs."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from dure import errors
from dure.spec import RunSpec

ROOT = Path(__file__).parents[2]
NAMES = {"Task", "Sum", "RunSpec", "RunSummary", "StepRecord", "Metric", "train", "evaluate", "export"}
ERRORS = {name for name, value in vars(errors).items() if isinstance(value, type)}


def modules_after(code: str) -> set[str]:
    """Run code in a fresh interpreter and return the names of the modules it loaded."""
    ending = "\nimport sys; print('modules:', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", code + ending], check=True, capture_output=True, text=True)
    return set(done.stdout.rpartition("modules:")[2].split())


def test_public_names_when_listed_then_they_are_the_few_that_were_agreed() -> None:
    dure = importlib.import_module("dure")
    assert set(dure.__all__) >= NAMES | {"DureError", "Misuse"}
    assert set(dure.__all__) <= NAMES | ERRORS | {"__version__"}


def test_public_names_when_asked_for_then_each_is_there_and_documented() -> None:
    dure = importlib.import_module("dure")
    assert [name for name in dure.__all__ if name != "__version__" and not getattr(dure, name).__doc__] == []


def test_import_when_only_dure_is_named_then_torch_is_not_loaded() -> None:
    assert "torch" not in modules_after("import dure")


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["strategies"]], ids=" ".join)
def test_command_when_it_only_talks_then_torch_is_not_loaded(words: list[str]) -> None:
    code = f"import dure.cli, sys\nsys.argv = ['dure', *{words}]\ntry: dure.cli.main()\nexcept SystemExit: pass"
    assert "torch" not in modules_after(code)


def test_spec_fields_when_shown_as_flags_then_each_has_its_help_text() -> None:
    assert [name for name, field in RunSpec.model_fields.items() if not field.description] == []
