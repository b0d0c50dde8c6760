"""Reader of Python files, with limits: no file makes it hang, fill the memory or raise anything except `Misuse`."""

import ast
import io
import os
import re
import stat
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from dure.errors import Misuse
from dure.terminal import one_line
from dure.units import format_bytes

MOST_BYTES = 4 * 2**20
"""Maximum size of a file; people write none of a tenth of it."""
MOST_FILES = 5000
"""Maximum files of a folder."""
MOST_DEPTH = 150
"""Maximum nesting of a syntax tree; the rules recurse over it."""
MOST_NODES = 100_000
"""Maximum nodes of a syntax tree: some 10,000 lines, more than people write."""
SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "venv", "build", "dist"}
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+$")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Python file: its text, with the line ends that it has, and its syntax tree."""

    path: Path
    name: str
    """Path as the user wrote it, or below the folder that was given."""
    text: str
    encoding: str
    tree: ast.Module
    lines: tuple[str, ...]
    """Lines with their ends, as Python counts them."""

    def offset(self, line: int, column: int) -> int:
        """Return the index in the text of a line (from 1) and a column in bytes of UTF-8, as the tree has them."""
        text = self.lines[line - 1]
        return self._starts[line - 1] + (column if text.isascii() else len(text.encode()[:column].decode()))

    @cached_property
    def _starts(self) -> list[int]:
        """Indices in the text at which lines begin."""
        return [0, *accumulate(map(len, self.lines))]

    def segment(self, node: ast.expr | ast.stmt) -> str:
        """Return the text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return the indices in the text of a node's first character, and of the one after its last."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)


def split_lines(text: str) -> tuple[str, ...]:
    """Return the lines of a text with their ends; unlike `str.splitlines`, form feeds and the like end none."""
    return tuple(_LINE.findall(text))


def read_source(path: Path, name: str) -> Source:
    """Read and parse a file.

    Args:
        path: Path of the file.
        name: Name for messages and findings.

    Raises:
        Misuse: It is not a readable file of Python source, or is too large or too deeply nested.
    """
    data = _read(path, name)
    shown = one_line(name)
    if b"\0" in data:
        raise Misuse(f"{shown} is not Python: it contains zero bytes; name a script, or a folder of scripts")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise Misuse(f"{shown} is not Python: its text is not in its encoding ({error}); save it as UTF-8") from None
    return parsed(text, path, name, encoding)


def parsed(text: str, path: Path, name: str, encoding: str = "utf-8") -> Source:
    """Parse a text.

    Raises:
        Misuse: It is not Python, or too deeply nested.
    """
    shown = one_line(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings are not this command's subject
            tree = ast.parse(text)
    except SyntaxError as error:
        raise Misuse(f"{shown}, line {error.lineno}: not Python 3 ({error.msg}); correct the syntax first") from None
    except (RecursionError, MemoryError):
        raise Misuse(f"{shown} is nested too deeply to be read; divide its longest expression") from None
    except ValueError as error:
        raise Misuse(f"{shown} is not Python: {error}") from None
    depth, count = _measures(tree)
    if count > MOST_NODES:
        raise Misuse(f"{shown} has more than {MOST_NODES:,} names, calls and so on: leave generated files out")
    if depth > MOST_DEPTH:
        raise Misuse(f"{shown} is nested more than {MOST_DEPTH} levels deep; divide its longest expression")
    return Source(path=path, name=name, text=text, encoding=encoding, tree=tree, lines=split_lines(text))


def is_python(text: str) -> bool:
    """Return whether a text can be parsed."""
    try:
        parsed(text, Path(), "")
    except Misuse:
        return False
    return True


def _read(path: Path, name: str) -> bytes:
    shown = one_line(name)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not be waited for
    except FileNotFoundError:
        raise Misuse(f"there is no {shown}: name a script, or a folder of scripts") from None
    except OSError as error:
        raise Misuse(f"{shown} cannot be read: {error.strerror}; check its permissions and links") from None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise Misuse(f"{shown} is not a regular file: name a script, or a folder of scripts")
        try:
            data = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise Misuse(f"{shown} cannot be read: {error.strerror}") from None
    if len(data) > MOST_BYTES:
        limit = format_bytes(MOST_BYTES)
        raise Misuse(f"{shown} is larger than {limit}, which no script is: name the files that people wrote")
    return data


def _measures(tree: ast.AST) -> tuple[int, int]:
    """Return the depth and the number of nodes of a tree, as far as they are allowed."""
    deepest, count, pending = 0, 0, [(tree, 1)]
    while pending:
        node, depth = pending.pop()
        deepest, count = max(deepest, depth), count + 1
        if depth > MOST_DEPTH or count > MOST_NODES:
            break
        pending += ((child, depth + 1) for child in ast.iter_child_nodes(node))
    return deepest, count


def python_files(folder: Path) -> list[Path]:
    """Return the Python files of a folder and of those below it, sorted, without hidden and generated ones.

    Links to folders are not followed, so that none is entered twice or for ever.

    Raises:
        Misuse: There is none, or there are too many.
    """
    found = []
    for path in _walk(folder):
        found.append(path)
        if len(found) > MOST_FILES:
            raise Misuse(f"{one_line(folder)} has more than {MOST_FILES:,} Python files: name a folder below it")
    if not found:
        raise Misuse(f"{one_line(folder)} has no Python files: name a script, or a folder of scripts")
    return sorted(found)


def _walk(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise Misuse(f"{one_line(error.filename)} cannot be read: {error.strerror}; check its permissions")

    for root, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS]
        yield from (Path(root, name) for name in files if name.endswith(".py") and not name.startswith("."))
