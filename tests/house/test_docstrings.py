"""First words of docstrings: the subject comes first, so that a reader need not look left for it."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.house.rooms import ROOT

SIDEWAYS = re.compile(r"(What|Where|Who|Whoever|Whose|How|Whether|Of|To|By|When|Which)\b")


def sideways(source: str) -> Iterator[str]:
    """Yield line and text of each docstring of a module, class or function that begins without its noun or verb."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if SIDEWAYS.match(text):
                yield f"{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"


def test_docstrings_when_read_then_each_begins_with_its_noun_or_verb() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in sorted((ROOT / "src").rglob("*.py"))
        if (lines := list(sideways(path.read_text(encoding="utf-8"))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    ['"""What a run is."""', 'class A:\n    """How it ended."""', 'def f():\n    """Whether it is over."""'],
)
def test_sideways_when_a_docstring_begins_with_a_question_then_it_is_found(source: str) -> None:
    assert len(list(sideways(source))) == 1
