"""First words of docstrings: the subject comes first, so that a reader need not look left for it."""

import ast
import inspect
import itertools
import re
from collections.abc import Iterator

import pytest

from tests.house.rooms import ROOT

SIDEWAYS = re.compile(
    r"(What|Where|Who|Whoever|Whose|How|Why|Whether|When|Which"
    r"|Of|To|By|As|At|In|Into|For|From|Since|Between|Within|Without|Below|Behind)\b"
)


def sideways(source: str) -> Iterator[str]:
    """Yield line and text of each docstring that begins without its noun or verb."""
    for node in statements(source):
        for line, text in docstrings(node):
            if SIDEWAYS.match(text):
                yield f"{line}: {text.splitlines()[0]}"


def statements(source: str) -> Iterator[ast.AST]:
    """Yield every node but the expressions, which have no docstrings and are most of a tree."""
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        yield node
        pending += (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))


def docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of the docstring of a node, and of each field that is assigned directly in it."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
    for block in ("body", "orelse", "finalbody"):
        statements = getattr(node, block, None)
        for field, below in itertools.pairwise(statements if isinstance(statements, list) else []):
            if isinstance(field, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr):
                text = below.value
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield below.lineno, inspect.cleandoc(text.value)


def test_docstrings_when_read_then_each_begins_with_its_noun_or_verb() -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for folder in ("src", "tests", "benchmarks", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (lines := list(sideways(path.read_text(encoding="utf-8"))))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        '"""What a run is."""',
        'class A:\n    """How it ended."""',
        'def f():\n    """Whether it is over."""',
        'LIMIT = 1\n"""How long it may take."""',
        'class A:\n    size: int = 0\n    """Of the file."""',
        'class A:\n    size: int = 0\n    """Without its header."""',
        'class A:\n    def __init__(self):\n        self.size = 0\n        """Of the file."""',
        'if LIMIT:\n    pass\nelse:\n    SIZE: int = 0\n    """What a file takes."""',
    ],
)
def test_sideways_when_a_docstring_begins_with_a_question_then_it_is_found(source: str) -> None:
    assert len(list(sideways(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        'LIMIT = 1\n"""Seconds that it may take."""',
        'LIMIT = 1\n"""Whereabouts of a file."""',
        'print(1)\n"""What this says is no docstring."""',
    ],
)
def test_sideways_when_a_docstring_begins_with_its_noun_then_it_passes(source: str) -> None:
    assert list(sideways(source)) == []
