"""Descriptors from a supervisor, distinguished from files of a script that have reused their numbers.

Code that turns its process into a daemon closes every descriptor, and the next files get the lowest numbers again.
"""

import fcntl
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_HIGHEST = 2**14
"""Upper bound of descriptors: a process pays for all numbers below its highest, eight bytes each, copied at every fork.
"""
_ROOM = 24
"""Number of descriptors at the top. Of the usual 1,024, those from 1,000 on: `os.closerange(3, 1000)` spares them."""


@dataclass(frozen=True, kw_only=True)
class _Kept:
    identity: tuple[int, int]
    """Device and inode of the file or socket."""
    origin: str
    """Path of the same file among the supervisor's descriptors."""


_kept: dict[int, _Kept] = {}
os.register_at_fork(after_in_child=_kept.clear)  # a process forked by a script must not write for its rank


def keep(descriptor: int) -> int:
    """Move a descriptor to a number that scripts hardly ever close or get; return the new number."""
    identity = _identity(descriptor)
    assert identity is not None
    kept = _Kept(identity=identity, origin=f"/proc/{os.getppid()}/fd/{descriptor}")
    with suppress(OSError):  # all high numbers are taken, or there are too few
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _top() - _ROOM)
        os.close(descriptor)
        descriptor = moved
    _kept[descriptor] = kept
    return descriptor


def is_own(descriptor: int) -> bool:
    """Return whether a descriptor is the one kept under this number, neither closed nor reused for another file."""
    return descriptor in _kept and _kept[descriptor].identity == _identity(descriptor)


def usable(descriptor: int) -> int | None:
    """Return a descriptor of the file that was kept under this number, reopened if it was closed (Linux).

    None if that is impossible, and in a process forked by the one that kept it.
    """
    kept = _kept.get(descriptor)
    if kept is None or is_own(descriptor):
        return descriptor if kept is not None else None
    try:
        again = os.open(kept.origin, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if _identity(again) == kept.identity:
        return again
    os.close(again)
    return None


@contextmanager
def refusing_to_close_ranges() -> Iterator[None]:
    """Refuse `os.closerange` in this process: its range includes torch's connections and dure's files.

    Without those, gloo aborts the process, and no message shows the reason. A process that this one forks may close
    them all.
    """
    close, pid = os.closerange, os.getpid()

    def refuse(low: int, high: int, /) -> None:
        if os.getpid() != pid:
            return close(low, high)
        raise PermissionError(
            f"os.closerange({low}, {high}) would close what torch and dure have open in this process: close what the "
            "task opened by itself"
        )

    os.closerange = refuse
    try:
        yield
    finally:
        os.closerange = close


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _top() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _HIGHEST if limit == resource.RLIM_INFINITY else min(limit, _HIGHEST)
