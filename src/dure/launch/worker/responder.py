"""Inside a rank: what answers the supervisor when it asks where the rank is, whatever that is doing.

A thread waits in a system call until it is asked, and costs nothing meanwhile. It holds Python's lock while it reads
the frames of the others, so they stand still, and no system call of theirs is interrupted: a script does not notice
that it is looked at. Where native code keeps the lock, the thread cannot answer. Then the supervisor sends a signal to
this very thread, whose handler in C writes all stacks without the lock.
"""

import _thread
import faulthandler
import json
import os
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from dure.process.context import Place
from dure.process.own_descriptors import is_own

STACKS_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
"""Signal on which a rank writes its stacks. Programs hardly ever use it; SIGUSR1 and SIGUSR2 are often theirs."""

MOST_COLLECTIVES = 64
"""Number of the last collectives that are reported: no person would read more, and a rank that waits makes no more
calls."""

STATE, COUNT = "state", "count"
"""Questions to a rank: its whole state, or only the number of its calls of process groups."""

LENGTH = struct.Struct("<I")
_QUESTIONS_BYTES = 4096
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}


def observe(place: Place) -> None:
    """Begin to answer. The main thread has to call this."""
    observer = None if place.questions_fd is None else _start_observer(place.questions_fd)
    if place.stacks_fd is not None and STACKS_SIGNAL is not None:
        who = "" if observer is None else f"observer {observer}\n"
        where = f"main thread 0x{threading.get_ident():x}\nstacks {place.stacks_fd}\n"
        os.write(place.stacks_fd, f"{where}{who}".encode())
        faulthandler.register(STACKS_SIGNAL, file=place.stacks_fd, all_threads=True, chain=False)
        # the stacks at a crash in native code go there too: nothing else would tell the line. Of all threads, for
        # gloo's own, which aborts where ranks do not agree on a shape, has no line of Python
        faulthandler.enable(file=place.stacks_fd, all_threads=True)


def _start_observer(descriptor: int) -> int:
    """Start the thread that answers, and return its number in the system.

    It is none that `threading` knows: some scripts wait for every thread in its list.
    """
    questions, main = socket.socket(fileno=descriptor), threading.get_ident()
    numbers: list[int] = []
    has_begun = _thread.allocate_lock()
    has_begun.acquire()

    def run() -> None:
        numbers.append(threading.get_native_id())
        has_begun.release()
        _answer(questions, main)

    _thread.start_new_thread(run, ())
    has_begun.acquire()
    return numbers[0]


def _answer(questions: socket.socket, main: int) -> None:
    if STACKS_SIGNAL is not None:  # signals are the script's: this thread must not be the one that gets them
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {STACKS_SIGNAL} - _CRASHES)
    rest = b""
    while True:
        try:
            data = questions.recv(_QUESTIONS_BYTES) if is_own(questions.fileno()) else b""
            if not data or not is_own(questions.fileno()):
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                what, number = line.decode().split()
                told = _told(main) if what == STATE else {"calls": _calls_made()}
                answer = json.dumps({"number": int(number), **told}, default=str).encode()
                questions.sendall(LENGTH.pack(len(answer)) + answer)
        except OSError:
            break
    questions.detach()  # its number may be another file's by now, which is not to be closed


def _told(main: int) -> dict[str, Any]:
    """Return what this process knows of itself; what cannot be had must not keep the rest back."""
    me = threading.get_ident()
    innermost = {ident: frame for ident, frame in sys._current_frames().items() if ident != me}
    told: dict[str, Any] = {
        "main": list(_frames(innermost.get(main))),
        "others": [list(_frames(frame)) for ident, frame in innermost.items() if ident != main],
        "calls": _calls_made(),
        "collectives": [],
        "call": None,
        "called": None,
        "groups": {},
    }
    compat = sys.modules.get("dure.torchcompat")
    if compat is None:
        return told
    try:
        for ident in sorted(innermost, key=lambda ident: ident != main):
            call = None if told["call"] else compat.call_under_way(innermost[ident])
            told["call"] = told["call"] or (call and {**call, "is_main": ident == main})
        told["called"] = compat.name_called(innermost[main]) if main in innermost else None
        told["groups"] = compat.group_members()
        told["collectives"] = compat.flight_record()[-MOST_COLLECTIVES:]
    except Exception as error:
        told["error"] = f"{type(error).__name__}: {error}"
    return told


def _calls_made() -> int:
    compat = sys.modules.get("dure.torchcompat")
    try:
        return -1 if compat is None else int(compat.calls_made())
    except Exception:  # a group that is just being made or taken down
        return -1


def _frames(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name
        frame = frame.f_back
