"""Findings of checks: the observation, the rule that it breaks, and the cure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

STATUSES = ("failure", "warning", "ok", "skipped")
"""Statuses, the gravest first, as they are shown."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check."""

    name: str
    """Name of the check."""
    status: str
    """Status, one of `STATUSES`."""
    seen: str
    rule: str = ""
    """Broken rule, such as `a run needs ...`."""
    cure: str = ""
    nodes: tuple[int, ...] = ()
    """Nodes to which the finding applies; empty for all together."""
    pair: tuple[str, ...] = ()
    """Ends of a connection, if the finding is about one: nodes, ranks or GPUs."""

    @property
    def text(self) -> str:
        """Finding as one sentence."""
        rule = f", but {self.rule}" if self.rule else ""
        cure = f": {self.cure}" if self.cure else ""
        return f"{self.seen}{rule}{cure}"


def ok(name: str, seen: str) -> Finding:
    """Return a finding without a fault."""
    return Finding(name=name, status="ok", seen=seen)


def skipped(name: str, why: str) -> Finding:
    """Return a finding about a skipped check, with the reason."""
    return Finding(name=name, status="skipped", seen=why)


def failure(name: str, seen: str, rule: str, cure: str, pair: tuple[str, ...] = ()) -> Finding:
    """Return a finding about a fault that prevents a run."""
    return Finding(name=name, status="failure", seen=seen, rule=rule, cure=cure, pair=pair)


def warning(name: str, seen: str, rule: str, cure: str, pair: tuple[str, ...] = ()) -> Finding:
    """Return a finding about a fault that may impair a run."""
    return Finding(name=name, status="warning", seen=seen, rule=rule, cure=cure, pair=pair)


def by_gravity(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return failures first, then warnings, then the others, each in the order of the checks."""
    return tuple(sorted(findings, key=lambda finding: STATUSES.index(finding.status)))


def same_together(findings: Sequence[Finding]) -> list[Finding]:
    """Return findings of several nodes with equal ones merged into one that names all their nodes."""
    nodes: dict[Finding, tuple[int, ...]] = {}
    for finding in findings:
        key = replace(finding, nodes=())
        nodes[key] = (*nodes.get(key, ()), *finding.nodes)
    return [replace(finding, nodes=found) for finding, found in nodes.items()]


@dataclass(frozen=True, kw_only=True)
class Report:
    """All findings of a preflight."""

    findings: tuple[Finding, ...]
    """Findings, the gravest first."""
    nodes: tuple[Mapping[str, Any], ...] = ()
    """Facts of each node, as plain values."""
    names: tuple[str, ...] = ()
    """Name of each node."""
    seconds: float = 0.0
    backend: str = ""

    @property
    def failures(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.status == "failure")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.status == "warning")

    @property
    def status(self) -> str:
        """Gravest status of all: `failure`, `warning` or `ok`."""
        return "failure" if self.failures else "warning" if self.warnings else "ok"

    @property
    def verdict(self) -> str:
        """Result in one line."""
        num_checks = len({finding.name for finding in self.findings if finding.status != "skipped"})
        warnings = f"{len(self.warnings)} warning{'s' * (len(self.warnings) > 1)}" if self.warnings else ""
        if self.failures:
            what = ", ".join(dict.fromkeys(finding.name for finding in self.failures))
            return f"not ready: {what}" + (f"; {warnings}" if warnings else "")
        hosts = f" of {len(self.names)} hosts" if len(self.names) > 1 else ""
        return f"ready: {num_checks} checks{hosts} in {self.seconds:.1f} s, {warnings or 'no warnings'}"

    def nodes_text(self, finding: Finding) -> str:
        """Return the names of the nodes to which a finding applies, if there are several."""
        if len(self.names) < 2 or not finding.nodes or len(finding.nodes) == len(self.names):
            return ""
        return ", ".join(self.names[node] for node in finding.nodes)

    def sentence_of(self, finding: Finding) -> str:
        """Return a finding as one sentence, with its nodes."""
        nodes = self.nodes_text(finding)
        return f"{nodes}: {finding.text}" if nodes else finding.text

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        checks = [asdict(finding) for finding in self.findings]
        return {
            "status": self.status,
            "verdict": self.verdict,
            "seconds": self.seconds,
            "backend": self.backend or None,
            "nodes": list(self.nodes),
            "checks": checks,
        }
