"""Python stacks that a rank writes when it crashes or cannot reply, and its main thread's fields in `/proc`."""

import itertools
import os
import re
import signal
from collections.abc import Iterable

from dure.failures.frames import Frame, own_file

TOLD_SIGNALS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGXCPU)
"""Signals of timers and limits that the process itself has set. One that nothing handles ends the process, but first
the thread that gets it writes its stack.
"""
_OWN_STACK = "Stack (most recent call first):"
_STACKS_LIMIT_BYTES = 2**20
_LAUNCHER = own_file("dure.launch.worker.child")
_MAIN = re.compile(r"^main thread 0x([0-9a-f]+)$", re.M)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*:\n((?:  [^\n]*\n?)*)", re.M)
_CRASHED = re.compile(r"^Current thread 0x[^\n]*:\n((?:  [^\n]*\n?)*)", re.M)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.M)
Threads = tuple[tuple[Frame, ...], tuple[tuple[Frame, ...], ...]]
"""Frames of the main thread, and those of the others."""


def head(descriptor: int) -> str:
    return os.pread(descriptor, 256, 0).decode(errors="replace")


def written_stacks(descriptor: int, begin: int) -> Threads:
    """Return the stacks that a rank's handler has written since `begin`."""
    return parse_stacks(head(descriptor), os.pread(descriptor, _STACKS_LIMIT_BYTES, begin).decode(errors="replace"))


def end_frames(descriptor: int, number: int) -> tuple[tuple[Frame, ...], bool]:
    """Return a thread's frames when a signal ended the process, the innermost first, and whether that thread got it.

    If it was not one of Python's that crashed, the frames are the main thread's; if none wrote its stack, there are no
    frames.
    """
    text = os.pread(descriptor, _STACKS_LIMIT_BYTES, 0).decode(errors="replace")
    if number in TOLD_SIGNALS:
        _, is_told, rest = text.rpartition(_OWN_STACK)
        return (_frames(rest), True) if is_told else ((), False)
    head, is_crash, rest = text.rpartition("Fatal Python error: ")
    if not is_crash:
        return (), False
    if (crashed := _CRASHED.search(rest)) is not None:
        return _frames(crashed[1]), True
    return parse_stacks(head, rest)[0], False


def _frames(text: str) -> tuple[Frame, ...]:
    found = (Frame(file=file, line=int(line), function=name) for file, line, name in _FRAME.findall(text))
    return without_launcher(found)


def parse_stacks(head: str, text: str) -> tuple[tuple[Frame, ...], tuple[tuple[Frame, ...], ...]]:
    """Parse the output of `faulthandler`.

    Args:
        head: Line that names the main thread.
        text: One dump of all threads.
    """
    named = _MAIN.search(head)
    main: tuple[Frame, ...] = ()
    others = []
    for ident, body in _THREAD.findall(text):
        frames = _frames(body)
        if named is not None and int(ident, 16) == int(named[1], 16):
            main = frames
        else:
            others.append(frames)
    return main, tuple(others)


def without_launcher(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Return frames without those that started this process, which a fork copies from its parent's stack."""
    return tuple(itertools.takewhile(lambda frame: frame.file != _LAUNCHER, frames))


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process."""
    return proc_stat(pid)[0] in ("T", "t")


def why_alive(pid: int) -> str | None:
    """Return why a process that was killed is still there; None if it is about to end, as far as the system says."""
    state = proc_stat(pid)[0]
    if state == "D":
        return "waits in the kernel, mostly for a disk or a network file system, where no signal reaches it"
    if state == "Z" and (tracer := _tracer_of(pid)):
        return f"has ended, but process {tracer} traces it and has not let it go"
    return None


def _tracer_of(pid: int) -> int:
    """Return the process that traces another, as a debugger does; 0 if there is none."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("TracerPid:")), 0)
    except OSError:
        return 0


def proc_stat(pid: int) -> list[str]:
    """Return the main thread's fields in `/proc` from the state on; the name before it may contain anything."""
    try:
        with open(f"/proc/{pid}/task/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return ["?"]
