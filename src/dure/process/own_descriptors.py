"""Descriptors that a supervisor gave this process, told from files of a script that have got their numbers.

Code that makes a daemon of its process closes every descriptor, and what it opens next has the lowest numbers again.
"""

import fcntl
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_HIGHEST = 2**14
"""Every process pays for the numbers below its highest one: eight bytes each, copied at every fork."""
_ROOM = 24
"""Numbers at the top. Of the usual 1,024, those from 1,000 on: `os.closerange(3, 1000)` leaves them alone."""


@dataclass(frozen=True, kw_only=True)
class _Kept:
    identity: tuple[int, int]
    """Device and number of the file or socket."""
    origin: str
    """Path of the same file among the descriptors of the supervisor."""


_kept: dict[int, _Kept] = {}
os.register_at_fork(after_in_child=_kept.clear)  # a process that a script forks must not speak in its rank's name


def keep(descriptor: int) -> int:
    """Move a descriptor to where a script hardly ever closes one or gets one; return its new number."""
    identity = _identity(descriptor)
    assert identity is not None
    kept = _Kept(identity=identity, origin=f"/proc/{os.getppid()}/fd/{descriptor}")
    with suppress(OSError):  # all numbers up there are taken, or there are too few
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _top() - _ROOM)
        os.close(descriptor)
        descriptor = moved
    _kept[descriptor] = kept
    return descriptor


def is_own(descriptor: int) -> bool:
    """Return whether a descriptor is what was kept under this number, and neither closed nor another file's."""
    return descriptor in _kept and _kept[descriptor].identity == _identity(descriptor)


def usable(descriptor: int) -> int | None:
    """Return a descriptor of the file that was kept under this number, opened again if it was closed (Linux).

    None where that cannot be had, and in a process that the one that kept it has forked.
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
    """Refuse `os.closerange` in this process: its numbers are those of torch's connections and of dure's files, too.

    Without those, gloo aborts the process, and no line says why. A process that this one forks may close them all.
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
