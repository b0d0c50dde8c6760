"""Rules, what they report, and the edits by which a finding is cured."""

import ast
import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from dure.scripts.lint.modules import Module
from dure.scripts.lint.source import Source, is_python, split_lines

if TYPE_CHECKING:
    from dure.scripts.lint.facts import Facts

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")
VERSION = 1
"""Version of the JSON form."""


class Edit(NamedTuple):
    """Replacement of a part of a file's text."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """Place at which a rule finds its fault."""

    module: Module
    node: ast.AST
    what: str
    """Effect of it."""
    cure: str
    """Cure as a sentence, for when there are no edits."""
    edits: tuple[Edit, ...] = ()
    is_safe: bool = False
    """True if the edits can be made without a look at the program."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Fault of distributed scripts."""

    id: str
    severity: Severity
    title: str
    why: str
    """Effect of the fault on a run, as sentences."""
    bad: str
    """Script with the fault."""
    good: str
    """The same script without it."""
    check: "Callable[[Facts], Iterator[Report]]"
    is_fixed: str = ""
    """Change that `--fix` makes; an empty string for none."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Fault in a file."""

    file: str
    line: int
    column: int
    rule: str
    severity: Severity
    what: str
    fix: str
    """Unified diff, or one sentence."""
    is_diff: bool
    is_safe: bool
    """True if `--fix` makes the change."""
    source: Source
    edits: tuple[Edit, ...]

    def to_json(self) -> dict[str, object]:
        """Return the finding in its stable form."""
        return {
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "rule": self.rule,
            "severity": self.severity,
            "what": self.what,
            "fix": self.fix,
            "is_diff": self.is_diff,
            "is_safe": self.is_safe,
        }


def finding_of(rule: Rule, report: Report) -> Finding:
    """Return a report as a finding, with its edits as a diff."""
    source = report.module.source
    node = report.node
    edits = report.edits if report.edits and is_python(edited(source.text, report.edits)) else ()
    diff = unified(source, edits) if edits else ""
    return Finding(
        file=source.name,
        line=getattr(node, "lineno", 1),
        column=getattr(node, "col_offset", 0) + 1,
        rule=rule.id,
        severity=rule.severity,
        what=report.what,
        fix=diff or report.cure,
        is_diff=bool(diff),
        is_safe=bool(diff) and report.is_safe,
        source=source,
        edits=edits,
    )


def edited(text: str, edits: Sequence[Edit]) -> str:
    """Return a text after edits that do not overlap."""
    for edit in sorted(edits, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def unified(source: Source, edits: Sequence[Edit]) -> str:
    """Return edits of a file as a unified diff."""
    after = split_lines(edited(source.text, edits))
    lines = difflib.unified_diff(source.lines, after, f"a/{source.name}", f"b/{source.name}", n=1)
    return "".join(line if line.endswith(("\n", "\r")) else f"{line}\n\\ No newline at end of file\n" for line in lines)


# --- edits that rules make


def replaced(module: Module, node: ast.expr | ast.stmt, text: str) -> Edit:
    """Return the edit that puts a text in the place of a node."""
    start, end = module.source.span(node)
    return Edit(start, end, text)


def line_end(module: Module) -> str:
    """Return how the lines of a file end."""
    first = module.source.lines[0] if module.source.lines else "\n"
    return first[len(first.rstrip("\r\n")) :] or "\n"


def inserted_before(module: Module, statement: ast.stmt, lines: Sequence[str]) -> tuple[Edit, ...]:
    """Return the edit that puts lines before a statement; none if the statement does not begin its line."""
    source = module.source
    first = min([statement.lineno, *(item.lineno for item in getattr(statement, "decorator_list", []))])
    before = source.lines[first - 1].encode()[: statement.col_offset].decode()
    if before.strip():
        return ()
    start = source.offset(first, 0)
    end = line_end(module)
    return (Edit(start, start, "".join(f"{before}{line}{end}" for line in lines)),)


def inserted_after(module: Module, statement: ast.stmt, lines: Sequence[str]) -> tuple[Edit, ...]:
    """Return the edit that puts lines after a statement; none if something else follows in its line."""
    source = module.source
    assert statement.end_lineno is not None
    assert statement.end_col_offset is not None
    before = source.lines[statement.lineno - 1].encode()[: statement.col_offset].decode()
    last_line = source.lines[statement.end_lineno - 1]
    rest = last_line.encode()[statement.end_col_offset :].decode().strip()
    if before.strip() or (rest and not rest.startswith("#")):
        return ()
    start = source.offset(statement.end_lineno, 0) + len(last_line)
    end = line_end(module)
    first = "" if last_line.endswith(("\n", "\r")) else end
    return (Edit(start, start, first + "".join(f"{before}{line}{end}" for line in lines)),)


def with_argument(module: Module, call: ast.Call, text: str) -> tuple[Edit, ...]:
    """Return the edit that adds an argument at the end of a call."""
    source = module.source
    _, end = source.span(call)
    items = [*call.args, *(item.value for item in call.keywords)]
    if not items:
        return (Edit(end - 1, end - 1, text),)
    _, after = max(source.span(item) for item in items)
    rest = source.text[after : end - 1]
    if rest.strip(" \t\r\n,)") and "#" not in rest:
        return ()
    depth = rest.count(")") if "#" not in rest else 0
    position = after + (rest.rfind(")") + 1 if depth else 0)
    return (Edit(position, position, f", {text}"),)
