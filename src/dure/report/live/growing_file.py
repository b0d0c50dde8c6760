"""Reader of a file of lines that grows while it is read."""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dure.records.jsonl import MOST_LINE_BYTES

_BLOCK_BYTES = 2**20
_MARK_BYTES = 256
"""Bytes before the position of the reader by which a file is recognised: a line holds its time to the microsecond."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Lines that a file has gained."""

    lines: Sequence[bytes]
    """Complete lines without their ends; blank lines are left out."""
    is_restarted: bool = False
    """True if the file was replaced or shortened: these are its first lines, and earlier ones are void."""
    num_too_long: int = 0
    """Number of lines that were left out because of their length."""
    left_bytes: int = 0
    """Bytes of the file that were not read yet, without a last line that is not complete."""


class GrowingFile:
    """File of lines, read from where the last reading ended.

    The writer may be in the middle of a line, may be killed there, and may shorten the file (a resume undoes steps) or
    replace it. The file may appear later, and be out of reach for some time. Each reading takes a bounded number of
    bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        """Bytes that were read: complete lines."""
        self.rest_bytes = 0
        """Bytes of a last line without an end."""
        self._mark = b""
        self._block_bytes = _BLOCK_BYTES
        self._skips_line = False

    def read(self) -> Gain:
        """Return the next complete lines.

        Raises:
            OSError: The system does not let it be read.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return Gain(lines=())
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                return Gain(lines=())
            return self._read(descriptor, found.st_size)
        finally:
            os.close(descriptor)

    def _begin_again(self) -> None:
        self.offset = self.rest_bytes = 0
        self._mark, self._block_bytes, self._skips_line = b"", _BLOCK_BYTES, False

    def _read(self, descriptor: int, size: int) -> Gain:
        is_restarted = not self._is_the_same(descriptor, size)
        if is_restarted:
            self._begin_again()
        new_bytes = size - self.offset
        data = os.pread(descriptor, min(self._block_bytes, new_bytes), self.offset) if new_bytes else b""
        has_more = new_bytes > len(data) > 0
        end = data.rfind(b"\n") + 1
        if end:
            lines, num_too_long = data[: end - 1].split(b"\n"), int(self._skips_line)
            del lines[:num_too_long]
            self._go_on(data[:end])
            self._block_bytes, self._skips_line = _BLOCK_BYTES, False
        else:
            lines, num_too_long = [], 0
            if has_more:
                self._read_longer_lines(data)
        left_bytes = size - self.offset
        self.rest_bytes = 0 if has_more else left_bytes
        return Gain(
            lines=[line for line in lines if line and not line.isspace()],
            is_restarted=is_restarted,
            num_too_long=num_too_long,
            left_bytes=left_bytes if has_more else 0,
        )

    def _read_longer_lines(self, data: bytes) -> None:
        """Let the next reading be of a longer line, or leave it out if no record is as long."""
        if self._block_bytes < MOST_LINE_BYTES and not self._skips_line:
            self._block_bytes *= 2
        else:
            self._block_bytes, self._skips_line = _BLOCK_BYTES, True
            self._go_on(data)

    def _go_on(self, data: bytes) -> None:
        self.offset += len(data)
        self._mark = (self._mark + data[-_MARK_BYTES:])[-_MARK_BYTES:]

    def _is_the_same(self, descriptor: int, size: int) -> bool:
        """Return whether the file begins with the lines that were read; it may be a copy that replaced it (rsync)."""
        if size < self.offset:
            return False
        return os.pread(descriptor, len(self._mark), self.offset - len(self._mark)) == self._mark
