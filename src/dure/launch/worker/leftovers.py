"""Processes that a rank started and that outlive it, such as the loader processes of a script: found and ended.

An orphan has another parent, and perhaps its own session. But processes forked by a rank hold the rank's unnamed file,
and processes that it executed have its environment. Two kinds are left alone: children of this process itself, whose
program may fork while ranks run, and programs in their own session (daemons, `tmux`), which others may use.
"""

import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress

MARK_VARIABLE = "DURE_INTERNAL_RANK_MARK"
_PATIENCE_SECONDS = 1.0
_END_BY_THEMSELVES = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
"""Programs that remove the shared memory of processes that are gone, and then end."""


def mark_of(descriptor: int) -> str:
    """Return a mark of a rank's processes: the number of an unnamed file that only they have open."""
    found = os.fstat(descriptor)
    return f"{found.st_dev}-{found.st_ino}"


def end_leftovers(marks: Collection[str], since_ticks: int) -> None:
    """End all processes of ranks that are gone (Linux).

    Args:
        marks: Marks of the ranks.
        since_ticks: Start of the first of the ranks, by `started_at`; none of their processes is older.
    """
    if not sys.platform.startswith("linux"):
        return
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while found := list(_marked(marks, since_ticks)):
        is_late = time.monotonic() > deadline
        for pid in found:
            if is_late or not _ends_by_itself(pid):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        if is_late:
            return
        time.sleep(0.002)


def started_at(pid: int) -> int:
    """Return the start time of a process, in the system's ticks; 0 if it is unknown."""
    try:
        return int(_read(f"/proc/{pid}/stat").rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return 0


def _marked(marks: Collection[str], since_ticks: int) -> Iterator[int]:
    me, session = os.getpid(), os.getsid(0)
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == me:
            continue
        try:
            fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()
            is_candidate = int(fields[19]) >= since_ticks and fields[0] not in (b"Z", b"X")
            if not is_candidate or _descends_from_here(int(fields[1])):
                continue
            if _holds_a_mark(name, marks) or (int(fields[3]) == session and _has_environment(name, marks)):
                yield int(name)
        except (OSError, IndexError):  # it has ended, or belongs to another user
            continue


def _descends_from_here(parent: int) -> bool:
    """Return whether a process with this parent is not a dead rank's: those of dead ranks have lost their parent."""
    me = os.getpid()
    if me == 1:  # init of a container, which adopts all orphans
        return False
    while parent > 1 and parent != me:
        parent = int(_read(f"/proc/{parent}/stat").rpartition(b")")[2].split()[1])
    return parent == me


def _has_environment(pid: str, marks: Collection[str]) -> bool:
    for entry in _read(f"/proc/{pid}/environ").split(b"\0"):
        variable, _, value = entry.partition(b"=")
        if variable == MARK_VARIABLE.encode() and value.decode(errors="replace") in marks:
            return True
    return False


def _holds_a_mark(pid: str, marks: Collection[str]) -> bool:
    for entry_name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{entry_name}"
        with suppress(OSError):
            if os.readlink(path).startswith("/memfd:"):
                found = os.stat(path)
                if f"{found.st_dev}-{found.st_ino}" in marks:
                    return True
    return False


def _ends_by_itself(pid: int) -> bool:
    with suppress(OSError):
        command = _read(f"/proc/{pid}/cmdline")
        return any(name in command for name in _END_BY_THEMSELVES)
    return True


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
