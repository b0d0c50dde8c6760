"""Files with one JSON object per line, appended by processes that may die in the middle of one."""

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dure.documents import DocumentInvalid, parse_json

MOST_LINE_BYTES = 256 * 2**20
"""Maximum bytes of a line. A step's samples, with `--record-samples`, may be millions."""


def last_record(path: Path) -> dict[str, Any]:
    """Return the last complete line of a record file, reading only its end, because it may have millions."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 2**16))
        lines = file.read().splitlines()
    return next((record for line in reversed(lines) if (record := parse_line(line)) is not None), {})


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
        end = len(data)
        while end:
            begin = data.rfind(b"\n", 0, end - 1) + 1
            record = parse_line(data[begin:end])
            if record is not None and is_before(record):
                break
            end = begin
        return end


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Parse a line; return None if a crash truncated it, or it is not a record."""
    try:
        record = parse_json(line, may_repeat_keys=True)
    except DocumentInvalid:
        return None
    return record if isinstance(record, dict) else None
