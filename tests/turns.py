"""Tests that run alone when others run side by side: those that measure time, or whose load would fail others."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def turn(folder: Path, *, alone: bool) -> Iterator[None]:
    """Wait until a test may run beside those that other workers of pytest-xdist run.

    Two locks of files: who comes first to the door holds it until it is in, so that a test that wants to be alone is
    not overtaken for ever by those that do not mind company.

    Args:
        folder: Of this session of pytest, the same for all workers.
        alone: Nothing else may run.
    """
    with (folder / "door").open("w") as door, (folder / "room").open("w") as room:
        os.set_inheritable(room.fileno(), False)
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            # not by closing alone: a rank that was forked meanwhile has the file open too
            fcntl.flock(room, fcntl.LOCK_UN)
