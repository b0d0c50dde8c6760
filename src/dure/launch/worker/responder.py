"""Responder inside a rank, which replies to the supervisor's requests for its state, whatever the rank is doing.

A thread waits in a system call for requests, and costs nothing meanwhile. It holds the GIL while it reads the frames of
the others, so they stand still and none of their system calls is interrupted: a script does not notice the probe. If
native code holds the GIL, the thread cannot reply. Then the supervisor sends a signal to this same thread, whose
handler in C writes all stacks without the GIL.
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

from dure.failures.tellable import is_done_in_time
from dure.launch.worker.stacks import TOLD_SIGNALS
from dure.process.context import Place
from dure.process.own_descriptors import is_own

STACKS_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
"""Signal on which a rank writes its stacks. Programs hardly ever use it; SIGUSR1 and SIGUSR2 are often used."""

MOST_COLLECTIVES = 64
"""Maximum number of reported collectives: no person would read more, and a rank that waits makes no more calls."""

STATE, COUNT, ENDING = "state", "count", "ending"
"""Requests to a rank: its whole state, the number of its process-group calls, or how far it has come in ending."""

LENGTH = struct.Struct("<I")
_QUESTIONS_BYTES = 4096
_CALLS = "dure.torchcompat.calls"
"""Module that reads calls of `torch.distributed`; not imported here, for a script may use no torch."""
_MOST_SECONDS_TO_TELL = 0.3
"""Seconds within which code of an exception's class must have told it, if its rank is to reply in time."""
_untold: set[int] = set()
"""Identities of exceptions whose classes had code that did not."""
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}


def observe(place: Place) -> None:
    """Start to reply to requests. The main thread has to call this."""
    observer = None if place.questions_fd is None else _start_observer(place.questions_fd)
    if place.stacks_fd is not None and STACKS_SIGNAL is not None:
        who = "" if observer is None else f"observer {observer}\n"
        where = f"main thread 0x{threading.get_ident():x}\nstacks {place.stacks_fd}\n"
        os.write(place.stacks_fd, f"{where}{who}".encode())
        faulthandler.register(STACKS_SIGNAL, file=place.stacks_fd, all_threads=True, chain=False)
        # Stacks at a crash in native code are written there too: nothing else would show the line. Of all threads,
        # because gloo's own, which aborts if ranks disagree on a shape, has no line of Python.
        faulthandler.enable(file=place.stacks_fd, all_threads=True)
        for number in TOLD_SIGNALS:  # a handler of the script replaces this, and a program that it starts has none
            faulthandler.register(number, file=place.stacks_fd, all_threads=False, chain=True)


def _start_observer(descriptor: int) -> int:
    """Start the responding thread, and return its number in the system.

    It is not in the list of `threading`: some scripts wait for every thread in it.
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
    if STACKS_SIGNAL is not None:  # signals are for the script: this thread must not receive them
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
                answer = json.dumps({"number": int(number), **_reply(what, main)}, default=str).encode()
                questions.sendall(LENGTH.pack(len(answer)) + answer)
        except OSError:
            break
    questions.detach()  # its number may belong to another file by now, which must not be closed


def _reply(what: str, main: int) -> dict[str, Any]:
    if what == STATE:
        return _own_state(main)
    return {"handled": _handled(main), "left_group_at": _left()} if what == ENDING else {"calls": _calls_made()}


def _own_state(main: int) -> dict[str, Any]:
    """Return this process's own state; an unavailable part must not prevent the rest."""
    me = threading.get_ident()
    innermost = {ident: frame for ident, frame in sys._current_frames().items() if ident != me}
    state: dict[str, Any] = {
        "main": list(_frames(innermost.get(main))),
        "others": [list(_frames(frame)) for ident, frame in innermost.items() if ident != main],
        "calls": _calls_made(),
        "handled": _handled(main),
        "collectives": [],
        "call": None,
        "called": None,
        "groups": {},
    }
    calls = sys.modules.get(_CALLS)
    if calls is None:
        return state
    try:
        for ident in sorted(innermost, key=lambda ident: ident != main):
            call = None if state["call"] else calls.call_under_way(innermost[ident])
            state["call"] = state["call"] or (call and {**call, "is_main": ident == main})
        state["called"] = calls.name_called(innermost[main]) if main in innermost else None
        state["groups"] = calls.group_members()
        state["collectives"] = calls.flight_record()[-MOST_COLLECTIVES:]
    except Exception as error:
        state["error"] = f"{type(error).__name__}: {error}"
    return state


def _handled(main: int) -> str | None:
    """Return the exception that the main thread is handling, as in a `finally`, unless it only reports a lost rank."""
    report = sys.modules.get("dure.failures.report")
    found: Any = sys._current_exceptions().get(main)
    error = found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
    if report is None or error is None or id(error) in _untold:
        return None
    brief: list[str | None] = []
    if not is_done_in_time(lambda: brief.append(report.handled_in_brief(error)), _MOST_SECONDS_TO_TELL):
        _untold.add(id(error))
    return brief[0] if brief else None


def _left() -> float | None:
    stores = sys.modules.get("dure.torchcompat.stores")
    return None if stores is None else stores.left_group_at()


def _calls_made() -> int:
    calls = sys.modules.get(_CALLS)
    try:
        return -1 if calls is None else int(calls.calls_made())
    except Exception:  # a group that is just being created or destroyed
        return -1


def _frames(frame: FrameType | None) -> Iterator[tuple[str, int, str]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name
        frame = frame.f_back
