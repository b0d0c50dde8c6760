"""Files with one JSON object per line, appended by processes that may die in the middle of one."""

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dure.documents import DocumentInvalid, parse_json

MOST_LINE_BYTES = 256 * 2**20
"""Maximum bytes of a line. A step's samples, with `--record-samples`, may be millions."""


_END_BYTES = 2**16
"""Bytes at the end of a file in which its last record is looked for, but at least two lines: one may be truncated."""


def last_record(path: Path) -> dict[str, Any]:
    """Return the last complete line of a record file, reading only its end, because it may have millions."""
    if not path.is_file() or path.stat().st_size == 0:
        return {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for number, (begin, end) in enumerate(_lines_from_the_end(data)):
            if number >= 2 and len(data) - end > _END_BYTES:
                break
            if end - begin <= MOST_LINE_BYTES and (record := parse_line(data[begin:end])) is not None:
                return record
    return {}


def _lines_from_the_end(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the lines of a file, the last line first."""
    end = len(data)
    while end:
        begin = data.rfind(b"\n", 0, end - 1) + 1
        yield begin, end
        end = begin


def read_lines(path: Path, begin: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a file from a byte offset on; none if there is no file."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(begin)
        while line := file.readline(MOST_LINE_BYTES):
            record = parse_line(line)
            if record is not None:
                yield record


def end_of_lines_until(path: Path, is_before: Callable[[dict[str, Any]], bool]) -> int:
    """Return the size of a file up to its last matching line, read from its end, because it may have millions.

    Args:
        path: Path of the file.
        is_before: Function that returns whether a line matches.
    """
    if path.stat().st_size == 0:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for begin, end in _lines_from_the_end(data):
            record = parse_line(data[begin:end])
            if record is not None and is_before(record):
                return end
    return 0


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Parse a line; return None if a crash truncated it, or it is not a record."""
    try:
        record = parse_json(line, may_repeat_keys=True)
    except DocumentInvalid:
        return None
    return record if isinstance(record, dict) else None
