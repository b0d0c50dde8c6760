"""Writes of records that wait while a disk is full for a moment."""

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from dure.errors import DiskFull
from dure.terminal import print_status

MOST_SECONDS = 30.0
"""Seconds for which writes wait for space: a rank that waits longer would seem to hang."""
_PAUSE_SECONDS = 0.2

Written = TypeVar("Written")


class SpaceWait:
    """Wait of one process for space, shared by all its writes: the next one after a failure does not begin again."""

    def __init__(self) -> None:
        self._deadline: float | None = None
        """Time on the monotonic clock at which the wait ends; None while there is space."""

    def write(self, write: Callable[[], Written]) -> Written:
        """Call a function, and again for some time while it finds no space: a disk may be full for a moment.

        Raises:
            OSError, DiskFull: There is none for `MOST_SECONDS`, or a limit on the size of files is the reason.
        """
        while True:
            try:
                written = write()
            except (OSError, DiskFull) as error:
                self._wait_after(error)
            else:
                self._deadline = None
                return written

    def _wait_after(self, error: OSError | DiskFull) -> None:
        if isinstance(error, OSError) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise error
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + MOST_SECONDS
            print_status(f"the disk is full: training waits for space for its records, at most {MOST_SECONDS:.0f} s")
        if now >= self._deadline:
            raise error
        time.sleep(_PAUSE_SECONDS)


SPACE_WAIT = SpaceWait()
