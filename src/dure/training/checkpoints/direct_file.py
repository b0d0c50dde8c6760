"""New file whose bytes go to the disk past the system's cache.

The cache costs a copy and a page fault for each page, which takes more processor time than digest and checks together,
from cores that training needs. A checkpoint is seldom read soon, so that nothing is gained by it.
"""

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType

import numpy as np

from dure.own_files import open_own

_BLOCK_BYTES = 4 * 2**20
_DIRECT = getattr(os, "O_DIRECT", 0)
_UNALIGNED = (errno.EINVAL, errno.EOPNOTSUPP)
"""Errors of file systems that do not support direct writing, or not of such blocks."""

Buffer = bytes | bytearray | memoryview


class DirectFile:
    """File that is written once, from begin to end, by way of one aligned block of memory."""

    def __init__(self, path: Path) -> None:
        """Create the file.

        Raises:
            OSError: It exists, or the system cannot create it.
        """
        self._descriptor = open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        self._set_direct(bool(_DIRECT))
        self._block = mmap.mmap(-1, _BLOCK_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._block))
        self._filled = 0

    def write(self, data: Buffer) -> int:
        """Write bytes, or keep them until there is a block of them; return their number."""
        view, begin = memoryview(data).cast("B"), 0
        while begin < len(view):
            size = min(len(view) - begin, _BLOCK_BYTES - self._filled)
            self._keep(view[begin : begin + size])
            begin += size
            if self._filled == _BLOCK_BYTES:
                self._write_block()
        return len(view)

    def flush(self) -> None:
        """Write the rest, whose size need not fit to the disk's blocks, and wait until all is on the disk."""
        self._set_direct(False)
        self._write_block()
        os.fsync(self._descriptor)

    def __enter__(self) -> "DirectFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def _keep(self, data: memoryview) -> None:
        # without the GIL, which training needs
        source = np.frombuffer(data, np.uint8)
        ctypes.memmove(self._address + self._filled, source.ctypes.data, len(data))
        self._filled += len(data)

    def _write_block(self) -> None:
        with memoryview(self._block) as block:
            left = block[: self._filled]
            while left:
                left = left[self._write_some(left) :]
        self._filled = 0

    def _write_some(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except OSError as error:
            if error.errno not in _UNALIGNED or not self._is_direct:
                raise
            self._set_direct(False)
            return os.write(self._descriptor, data)

    def _set_direct(self, is_direct: bool) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        self._is_direct = is_direct
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | _DIRECT if is_direct else flags & ~_DIRECT)
        except OSError as error:
            if error.errno not in _UNALIGNED:
                raise
            self._is_direct = False
