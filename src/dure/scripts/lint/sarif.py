"""SARIF 2.1.0, the form in which code hosts read findings."""

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from dure.scripts.lint.finding import Edit, Finding
from dure.scripts.lint.rules.table import RULES
from dure.scripts.lint.source import Source

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def to_sarif(findings: Sequence[Finding], version: str) -> dict[str, Any]:
    """Return findings as a SARIF log.

    Args:
        findings: Findings of one check.
        version: Version of dure.
    """
    numbers = {rule.id: number for number, rule in enumerate(RULES)}
    rules = [
        {
            "id": rule.id,
            "shortDescription": {"text": rule.title},
            "fullDescription": {"text": rule.why},
            "defaultConfiguration": {"level": rule.severity},
            "help": {"text": f"{rule.why}\n\nBad:\n\n{rule.bad}\nGood:\n\n{rule.good}"},
        }
        for rule in RULES
    ]
    driver = {"name": "dure lint", "version": version, "rules": rules}
    results = [_result(finding, numbers[finding.rule]) for finding in findings]
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results,
                                                             "columnKind": "unicodeCodePoints"}]}  # fmt: skip


def _result(finding: Finding, number: int) -> dict[str, Any]:
    where = {"uri": _uri(finding.file)}
    message = finding.what if finding.is_diff else f"{finding.what}. {finding.fix}"
    column = len(finding.source.lines[finding.line - 1].encode()[: finding.column - 1].decode()) + 1
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": number,
        "level": finding.severity,
        "message": {"text": message},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": where,
                    "region": {"startLine": finding.line, "startColumn": column},
                }
            }
        ],
    }
    if finding.edits:
        changes = [_replacement(finding.source, edit) for edit in sorted(finding.edits)]
        result["fixes"] = [
            {
                "description": {"text": "Apply the change"},
                "artifactChanges": [{"artifactLocation": where, "replacements": changes}],
            }
        ]
    return result


def _replacement(source: Source, edit: Edit) -> dict[str, Any]:
    (start_line, start_column), (end_line, end_column) = _place(source, edit.start), _place(source, edit.end)
    region = {"startLine": start_line, "startColumn": start_column, "endLine": end_line, "endColumn": end_column}
    return {"deletedRegion": region, "insertedContent": {"text": edit.text}}


def _place(source: Source, offset: int) -> tuple[int, int]:
    """Return line and column, from 1, of an index in a text."""
    line = 1
    for text in source.lines:
        if offset < len(text) or line == len(source.lines):
            return line, offset + 1
        offset -= len(text)
        line += 1
    return line, offset + 1


def _uri(name: str) -> str:
    path = PurePosixPath(name)
    data = str(path).encode("utf-8", "surrogateescape")
    return f"file://{quote(data)}" if path.is_absolute() else quote(data)
