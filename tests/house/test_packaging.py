"""pyproject.toml and constraints.txt belong together."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [Requirement(line) for lines in (PROJECT["dependencies"], *EXTRAS.values()) for line in lines]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("requirement", [r for r in REQUIREMENTS if r.name != "dure"], ids=str)
def test_requirement_when_constrained_then_its_pin_is_in_the_range(requirement: Requirement) -> None:
    assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_range_of_torch_when_said_to_people_then_is_the_one_that_is_installed() -> None:
    (torch,) = [requirement for requirement in REQUIREMENTS if requirement.name == "torch"]
    first, _, last = re.search(
        r"torch (2\.\d+)( to (2\.\d+))?\.", (ROOT / "README.md").read_text(encoding="utf-8")
    ).groups()
    bounds = {specifier.operator: specifier.version for specifier in torch.specifier}
    assert bounds == {">=": first, "<": f"2.{int(last.partition('.')[2]) + 1}"}


def test_constraints_when_read_then_they_name_no_host() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8") + (ROOT / "Makefile").read_text(encoding="utf-8")
    assert not re.search(r"https?://|--index-url|--extra-index-url|--find-links", text)


def test_python_when_supported_then_make_checks_for_the_same_version() -> None:
    assert PROJECT["requires-python"] == ">=3.11"
    assert "sys.version_info < (3, 11)" in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted((ROOT / "tests/cluster").glob("test_*.py")), ids=lambda path: path.name)
def test_clusters_tests_when_others_are_chosen_then_none_of_them_runs(path: Path) -> None:
    marks = set(re.findall(r"pytest\.mark\.(\w+)", path.read_text(encoding="utf-8"))) - {"parametrize", "timeout"}
    assert marks == {"cluster"}  # CI asks for `slow or faults`, and installs no Slurm
