"""The way out to the terminal: one module writes, and what it writes is escaped."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.dotted_names import dotted_name

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/dure"
WRITERS = {
    "terminal.py": "escapes what it writes",
    "styled.py": "escapes what it draws",
    "launch/logs/log_pump.py": "a process of its own that escapes what ranks print",
    "launch/worker/child.py": "gives a rank its streams, whose lines the pump escapes",
    "launch/logs/rank_logs.py": "hands the pump's lines to a notebook",
    "compat/horovod/torch/optimizer.py": "warns in fixed words, as Horovod does",
    "compat/horovod/torch/reductions.py": "warns in fixed words, as Horovod does",
}
STREAMS = ("sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__")
HARMLESS = ("flush", "isatty", "fileno")
PRINTING = ("traceback.print", "warnings.warn", "warnings.showwarning", "logging.basicConfig", "logging.StreamHandler")
DRAWING = ("Console", "Text")


def ways_out(source: str) -> Iterator[str]:
    """Yield line and name of each way by which a module could write to the terminal."""
    tree = ast.parse(source)
    for parent in ast.walk(tree):
        for node in ast.iter_child_nodes(parent):
            name = dotted_name(node) if isinstance(node, ast.Name | ast.Attribute) else ""
            is_way_out = name == "print" or name.startswith(PRINTING)
            if is_way_out or (name in STREAMS and not _is_harmless(node, parent)):
                yield f"{node.lineno}: {name}"
            elif isinstance(node, ast.Call):
                yield from _calls_out(node)
            elif isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                yield from (f"{node.lineno}: {name}" for name in names if name.startswith((*STREAMS, *PRINTING)))
                yield from (f"{node.lineno}: {name}" for name in names & {"rich.print", "rich.markup.render"})
            elif isinstance(node, ast.Constant) and node.value == "/dev/tty":
                yield f"{node.lineno}: /dev/tty"


def _is_harmless(node: ast.Attribute, parent: ast.AST) -> bool:
    is_asked = isinstance(parent, ast.Attribute) and parent.attr in HARMLESS
    return is_asked or isinstance(parent, ast.Compare) or not isinstance(node.ctx, ast.Load)


def _calls_out(call: ast.Call) -> Iterator[str]:
    name = dotted_name(call.func)
    if set(name.split(".")) & set(DRAWING):
        yield f"{call.lineno}: {name}"
    if name == "os.write":
        where, what = call.args
        is_terminal = any(stream in ast.unparse(where) for stream in STREAMS) or ast.unparse(where) in ("1", "2")
        if is_terminal and not isinstance(what, ast.Constant):
            yield f"{call.lineno}: {name}({ast.unparse(where)}, ...)"


def test_modules_when_read_then_only_the_writers_reach_the_terminal() -> None:
    found = {
        str(path.relative_to(PACKAGE)): ways
        for path in PACKAGE.rglob("*.py")
        if (ways := list(ways_out(path.read_text(encoding="utf-8"))))
    }
    assert {name: ways for name, ways in found.items() if name not in WRITERS} == {}
    assert set(found) == set(WRITERS) - {"launch/logs/log_pump.py"}


@pytest.mark.parametrize(
    "line",
    [
        "print(name)",
        "store = Store(warn=print)",
        "sys.stderr.write(name)",
        "show(file=sys.stdout)",
        "from sys import stderr",
        "traceback.print_exc()",
        "from traceback import print_exc",
        "warnings.warn(name)",
        "Console().print(name)",
        "rich.console.Console()",
        "Text.from_markup(name)",
        "os.write(2, name)",
        "os.write(sys.stdout.fileno(), name)",
        "open('/dev/tty', 'w')",
    ],
)
def test_ways_out_when_one_is_written_then_it_is_found(line: str) -> None:
    assert len(list(ways_out(line))) == 1


def test_ways_out_when_streams_are_only_asked_then_none_is_found() -> None:
    assert list(ways_out("sys.stdout.flush(); sys.stderr.isatty(); sys.stdout is None; sys.stderr = new")) == []
