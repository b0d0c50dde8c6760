"""Check of a script or a folder: reading, rules, `# noqa`."""

import io
import os
import re
import tokenize
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dure.errors import Misuse
from dure.scripts.lint.facts import Facts
from dure.scripts.lint.finding import SEVERITIES, VERSION, Finding, finding_of
from dure.scripts.lint.modules import Module, is_script
from dure.scripts.lint.project import Project
from dure.scripts.lint.rules.table import RULES
from dure.scripts.lint.source import Source, python_files, read_source
from dure.terminal import one_line

MOST_CONTEXT = 60
"""Maximum modules that are looked at for what a script imports from them, the nearest first."""
_PARALLEL = re.compile(r"distributed|DataParallel|accelerat|horovod|[Ff]abric|lightning|deepspeed")
"""Words without which a script has nothing to do with several devices."""
_NOQA = re.compile(r"#\s*noqa\b(?:\s*:\s*(?P<codes>[A-Z]+[0-9]+(?:[\s,]+[A-Z]+[0-9]+)*))?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Result of a check."""

    findings: tuple[Finding, ...]
    num_files: int
    unreadable: tuple[str, ...]
    """Sentences on files of a folder that could not be read."""

    def to_json(self) -> dict[str, object]:
        """Return the result in its stable form."""
        return {
            "version": VERSION,
            "files": self.num_files,
            "findings": [finding.to_json() for finding in self.findings],
            "unreadable": list(self.unreadable),
        }


def check(path: Path) -> Checked:
    """Check a script, or all Python files of a folder and of those below it.

    Modules that a script imports from its own folder are read too, so that their functions are known. Nothing is
    reported in them.

    Raises:
        Misuse: There is no such file, or it is not Python; in a folder only if none can be read.
    """
    if os.path.isdir(path):  # which raises nothing
        return _check_folder(path)
    source = read_source(path, str(path))
    module = Module(source=source, dotted=(path.stem,))
    modules = [module, *_imported(module, path)]
    return Checked(findings=tuple(checked(Project(modules))), num_files=1, unreadable=())


def _check_folder(folder: Path) -> Checked:
    modules, unreadable = [], []
    for path in python_files(folder):
        try:
            source = read_source(path, str(path))
        except Misuse as fault:
            unreadable.append(str(fault))
            continue
        dotted = path.relative_to(folder).with_suffix("").parts
        modules.append(Module(source=source, dotted=dotted[:-1] if dotted[-1] == "__init__" else dotted))
    if not modules:
        more = f" (and {len(unreadable) - 1} more)" if len(unreadable) > 1 else ""
        raise Misuse(f"no file of {one_line(folder)} can be read: {unreadable[0]}{more}")
    findings = []
    project = Project(modules)
    for group in connected(project):
        try:
            findings += checked(project.part(group))
        except Misuse as fault:  # one script's, which is no reason to leave out the others
            unreadable.append(str(fault))
    return Checked(findings=tuple(sorted(findings, key=_place)), num_files=len(modules), unreadable=tuple(unreadable))


def _place(finding: Finding) -> tuple[str, int, int, str]:
    return finding.file, finding.line, finding.column, finding.rule


def connected(project: Project) -> Iterator[list[Module]]:
    """Yield for each script of a folder the modules that it imports; what no script imports is a script."""
    modules = project.modules
    uses = {module: list(_uses(project, module)) for module in modules}
    used = {other for others in uses.values() for other in others}
    reported: set[Module] = set()
    scripts = [module for module in modules if module not in used or is_script(module)]
    # a module that several scripts use is reported for the first: one that has to do with ranks
    scripts.sort(key=lambda module: _PARALLEL.search(module.source.text) is None)
    for script in [*scripts, *(m for m in modules if m not in scripts)]:
        if script in reported:
            continue
        group, pending = [script], [script]
        seen = {script}
        while pending and len(group) < MOST_CONTEXT:
            for other in uses[pending.pop(0)]:
                if other not in seen and len(group) < MOST_CONTEXT:
                    seen.add(other)
                    group.append(other)
                    pending.append(other)
        for module in group:
            module.is_context = module in reported
        if any(_PARALLEL.search(m.source.text) for m in group) and any(
            "torch" in m.source.text for m in group if not m.is_context
        ):
            yield group
        reported.update(group)


def _uses(project: Project, module: Module) -> Iterator[Module]:
    for name in sorted({*module.imports.values(), *module.stars}):
        for dotted in (name, name.rpartition(".")[0]):
            other = project.module_named(dotted) if dotted else None
            if other is not None and other is not module:
                yield other


def _imported(module: Module, path: Path) -> list[Module]:
    """Return the modules next to a script, and in packages below its folder, that it imports."""
    found: dict[Path, Module] = {}
    pending = [(module, path.parent)]
    while pending and len(found) < MOST_CONTEXT:
        current, folder = pending.pop(0)
        for name in sorted({*current.imports.values(), *current.stars}):
            parts = name.split(".")
            for number in range(len(parts), 0, -1):
                candidate = _file_of(path.parent, parts[:number]) or _file_of(folder, parts[:number])
                if candidate is None or candidate == path or candidate in found:
                    continue
                try:
                    source = read_source(candidate, str(candidate))
                except Misuse:
                    continue  # it is not what is checked
                other = Module(source=source, dotted=tuple(parts[:number]), is_context=True)
                found[candidate] = other
                pending.append((other, candidate.parent))
    return list(found.values())


def _file_of(folder: Path, parts: Collection[str]) -> Path | None:
    base = folder.joinpath(*parts)
    for candidate in (base.with_suffix(".py") if base.name else base, base / "__init__.py"):
        try:
            if candidate.is_file():
                return candidate
        except (OSError, ValueError):
            return None
    return None


def checked(project: Project) -> list[Finding]:
    """Return the findings in modules that belong together."""
    facts = Facts(project)
    found: dict[tuple[str, int, str], Finding] = {}
    silenced: dict[Source, dict[int, set[str]]] = {}
    for rule in RULES:
        try:
            reports = list(rule.check(facts))
        except RecursionError:
            name = one_line(project.modules[0].source.name)
            raise Misuse(f"{name} is nested too deeply to be read; divide its longest expression") from None
        for report in reports:
            if report.module.is_context:
                continue
            source = report.module.source
            lines = silenced.setdefault(source, _silenced_lines(source))
            first = getattr(report.node, "lineno", 1)
            last = getattr(report.node, "end_lineno", None) or first
            is_block = hasattr(report.node, "body") and isinstance(report.node.body, list)
            span: Iterable[int] = (first,) if is_block else range(first, last + 1)
            if not any(_is_silenced(lines.get(line), rule.id) for line in span):
                finding = finding_of(rule, report)
                found.setdefault((finding.file, finding.line, finding.rule), finding)
    return sorted(found.values(), key=_place)


def _is_silenced(codes: set[str] | None, rule: str) -> bool:
    return codes is not None and (not codes or rule in codes)


def _silenced_lines(source: Source) -> dict[int, set[str]]:
    """Return the lines with `# noqa`, each with its codes; without codes it is for all rules."""
    found: dict[int, set[str]] = {}
    if "noqa" not in source.text.lower():
        return found
    try:
        for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
            if token.type == tokenize.COMMENT and (match := _NOQA.search(token.string)):
                codes = {code.upper() for code in re.findall(r"[A-Za-z]+[0-9]+", match["codes"] or "")}
                found[token.start[0]] = codes
    except (tokenize.TokenError, SyntaxError):
        pass  # the parser has accepted the file; what the tokenizer has read so far counts
    return found


def worst(findings: Iterable[Finding]) -> str | None:
    """Return the gravest severity among findings."""
    return max((finding.severity for finding in findings), key=SEVERITIES.index, default=None)
