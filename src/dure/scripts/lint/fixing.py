"""Rewriting of files: safe edits only, each file at once, and checked before it takes the place of the old one."""

import os
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dure.errors import Misuse
from dure.own_files import sync_folder
from dure.scripts.lint.finding import Edit, Finding, edited
from dure.scripts.lint.source import Source, parsed
from dure.terminal import one_line


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Result of rewriting files."""

    fixed: tuple[Finding, ...]
    refused: tuple[tuple[Finding, str], ...]
    """Findings that are left, each with the reason."""


def fix(findings: Sequence[Finding]) -> Fixed:
    """Make the safe edits of findings in their files.

    Comments and formatting stay: only the parts that an edit names are replaced. The result is parsed before it is
    written, to a new file that then takes the old one's place.

    Raises:
        Misuse: A file cannot be written, or has changed since it was read.
    """
    fixed: list[Finding] = []
    refused: list[tuple[Finding, str]] = []
    by_source: dict[Path, list[Finding]] = {}
    for finding in findings:
        if not finding.is_safe:
            reason = (
                "its cure changes what the script does: apply the diff by hand" if finding.is_diff else "it has no diff"
            )
            refused.append((finding, reason))
        else:
            by_source.setdefault(finding.source.path, []).append(finding)
    for wanted in by_source.values():
        source = wanted[0].source
        edits: list[Edit] = []
        taken: list[Finding] = []
        for finding in wanted:
            if any(_overlap(edit, other) for edit in finding.edits for other in edits if edit != other):
                refused.append((finding, "another fix changes the same place: run --fix again"))
                continue
            edits += [edit for edit in finding.edits if edit not in edits]
            taken.append(finding)
        text = edited(source.text, edits)
        try:
            parsed(text, source.path, source.name)
        except Misuse:
            refused += [(finding, "the changed file would not be Python") for finding in taken]
            continue
        _replace(source, text)
        fixed += taken
    return Fixed(fixed=tuple(fixed), refused=tuple(refused))


def _overlap(one: Edit, other: Edit) -> bool:
    return (one.start < other.end and other.start < one.end) or one.start == other.start


def _replace(source: Source, text: str) -> None:
    shown = one_line(source.name)
    data = text.encode(source.encoding)
    path = source.path.resolve()  # a link stays one, and its file is rewritten
    temporary = None
    try:
        found = path.stat()
        if path.read_bytes() != source.text.encode(source.encoding):
            raise Misuse(f"{shown} has changed since it was read: run --fix again")
        if not os.access(path, os.W_OK):
            raise Misuse(f"{shown} is not fixed: it is not writable; change its permissions or leave --fix out")
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, stat.S_IMODE(found.st_mode))
            with suppress(PermissionError):
                os.fchown(descriptor, found.st_uid, found.st_gid)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
        temporary = None
        sync_folder(path.parent)
    except OSError as error:
        raise Misuse(f"{shown} cannot be written: {error.strerror}; it is unchanged") from None
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
