"""`dure lint`: faults of distributed scripts, found in their source."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from dure.cli.output import JsonFlag
from dure.errors import FoundProblem, Misuse
from dure.terminal import one_line, print_json, print_status, print_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dure.scripts.lint.check import Checked
    from dure.scripts.lint.finding import Finding
    from dure.scripts.lint.fixing import Fixed

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold"}


def read(tokens: list[str]) -> tuple[list[str], Callable[..., None]]:
    """Return the tokens and the verb."""
    return tokens, lint


def lint(
    path: Annotated[
        Path | None, Parameter(help="a script, or a folder of scripts (default: the current folder)")
    ] = None,
    /,
    *,
    fix: Annotated[
        bool, Parameter(name="--fix", negative=(), show_default=False, help="make the changes that are safe")
    ] = False,
    fail_on: Annotated[
        Literal["never", "note", "warning", "error"], Parameter(help="end with 4 if something so grave is found")
    ] = "note",
    json: JsonFlag = False,
    sarif: Annotated[
        bool,
        Parameter(name="--sarif", negative=(), show_default=False, help="print SARIF 2.1.0, which code hosts read"),
    ] = False,
    rules: Annotated[
        bool, Parameter(name="--rules", negative=(), show_default=False, help="print all rules as a Markdown page")
    ] = False,
) -> None:
    """Look for the faults of distributed scripts in their source, which is not run. Exits with 4 if it finds some."""
    if json and sarif:
        raise Misuse("--json and --sarif are two forms of one answer: choose one")
    if rules:
        from dure.scripts.lint.page import markdown_page

        print_text(markdown_page().removesuffix("\n"))
        return
    from dure.scripts.lint.check import check, worst
    from dure.scripts.lint.finding import SEVERITIES

    found = check(path if path is not None else Path())
    fixed = _fixed(found.findings) if fix else None
    left = found.findings if fixed is None else tuple(finding for finding, _ in fixed.refused)
    if json:
        print_json(_document(found, fixed))
    elif sarif:
        from dure.cli.output import installed_version
        from dure.scripts.lint.sarif import to_sarif

        print_json(to_sarif(left, installed_version()))
    else:
        _show(found, fixed)
    for sentence in found.unreadable:
        print_status(f"{sentence} (left out)")
    gravest = worst(left)
    if fail_on != "never" and gravest is not None and SEVERITIES.index(gravest) >= SEVERITIES.index(fail_on):
        raise FoundProblem(_summary(left))
    if found.unreadable:
        raise Misuse(f"{len(found.unreadable)} of {found.num_files + len(found.unreadable)} files could not be read")


def _fixed(findings: Sequence["Finding"]) -> "Fixed":
    from dure.scripts.lint.fixing import fix

    return fix(findings)


def _document(found: "Checked", fixed: "Fixed | None") -> dict[str, object]:
    if fixed is None:
        return found.to_json()
    reasons = {id(finding): reason for finding, reason in fixed.refused}
    findings = [
        {**finding.to_json(), "is_fixed": id(finding) not in reasons, "not_fixed_because": reasons.get(id(finding), "")}
        for finding in found.findings
    ]
    return {**found.to_json(), "findings": findings}


def _summary(findings: Sequence["Finding"]) -> str:
    count, files = len(findings), len({finding.file for finding in findings})
    counts = [
        f"{number} {name}{'' if number == 1 else 's'}"
        for name in ("error", "warning", "note")
        if (number := sum(finding.severity == name for finding in findings))
    ]
    return f"{count} finding{'' if count == 1 else 's'} in {files} file{'' if files == 1 else 's'}: {', '.join(counts)}"


class _DiffLine(str):
    """Line of a diff. It is never broken: it is there to be copied."""

    __slots__ = ()


def _show(found: "Checked", fixed: "Fixed | None") -> None:
    from dure.styled import PIPE_COLUMNS, draw, styled

    columns = shutil.get_terminal_size((PIPE_COLUMNS, 24)).columns
    for line in _lines(found, fixed):
        if not isinstance(line, _DiffLine):
            draw(line)
        elif len(line) >= columns or not line.isascii():
            print_text(one_line(line))
        else:
            sign = line[2:3]
            is_head = line.strip().startswith(("---", "+++"))
            draw(styled(line, "dim" if is_head else "green" if sign == "+" else "red" if sign == "-" else "dim"))


def _lines(found: "Checked", fixed: "Fixed | None") -> Iterator["RenderableType"]:
    from dure.styled import Hanging, joined, styled

    reasons = {} if fixed is None else {id(finding): reason for finding, reason in fixed.refused}
    for number, finding in enumerate(found.findings):
        if number:
            yield ""
        place = f"{finding.file}:{finding.line}"
        yield Hanging(joined((place, "bold"), ": ", (finding.severity, _STYLES[finding.severity]), f" {finding.rule}"))
        yield Hanging(joined("  ", finding.what))
        if fixed is not None and id(finding) not in reasons:
            yield joined(("  fixed", "bold green"))
            continue
        if finding.is_diff:
            for line in finding.fix.splitlines():
                yield _DiffLine(f"  {line}")
        else:
            yield Hanging(joined(("  cure: ", "bold"), finding.fix))
        if fixed is not None:
            yield Hanging(joined(("  not fixed: ", "bold"), reasons[id(finding)]))
        elif finding.is_safe:
            yield styled("  --fix makes this change", "dim")
    if not found.findings:
        files = f"{found.num_files} file{'' if found.num_files == 1 else 's'}"
        yield styled(f"nothing found in {files}, as far as the source tells")
