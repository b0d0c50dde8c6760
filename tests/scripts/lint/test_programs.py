"""Programs in the styles that people write: their faults are found, and nothing else.

`programs.txt` has them one after the other. A line `@@ name module` begins a file; a program may have several.
Its first line names the rules that must be found.
"""

import re
from pathlib import Path

import pytest

from tests.scripts.lint.projects import findings_of

TEXT = Path(__file__).with_name("programs.txt").read_text(encoding="utf-8")
FILES = re.findall(r"^@@ (\S+) (\S+)\n(.*?)(?=^@@ |\Z)", TEXT, re.MULTILINE | re.DOTALL)
PROGRAMS: dict[str, dict[str, str]] = {}
for _program, _module, _source in FILES:
    PROGRAMS.setdefault(_program, {})[_module] = _source


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_when_it_is_read_then_its_faults_are_found_and_nothing_else(name: str) -> None:
    files = PROGRAMS[name]
    expected = set(re.findall(r"DURE\d{3}", files["train"].partition("\n")[0]))
    assert {finding.rule for finding in findings_of(**files)} == expected


def test_programs_when_counted_then_none_is_left_out() -> None:
    clean = [name for name in PROGRAMS if name.startswith("clean")]
    assert len(clean) == 15
    assert len(PROGRAMS) - len(clean) == 47
