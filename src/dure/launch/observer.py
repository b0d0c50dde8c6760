"""Inside a rank: what answers the supervisor when it asks where the rank is, whatever that is doing.

Two ways, for one alone can fail. The Python stacks of all threads are written by a signal handler in C, which needs no
lock of Python's: it works while native code holds it. The record of collectives needs a Python thread, which waits in
a system call until it is asked, and costs nothing meanwhile.
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
from typing import Any

from dure.place import Place

STACKS_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
"""One that programs hardly ever use; SIGUSR1 and SIGUSR2 are often theirs."""

MOST_COLLECTIVES = 64
"""Of the last ones: more would only be read by machines, and a rank that waits has not gone on since."""

LENGTH = struct.Struct("<I")
_QUESTION_BYTES = 16


def observe(place: Place) -> None:
    """Begin to answer. The main thread has to call this."""
    if place.stacks_fd is not None and STACKS_SIGNAL is not None:
        os.write(place.stacks_fd, f"main thread 0x{threading.get_ident():x}\n".encode())
        faulthandler.register(STACKS_SIGNAL, file=place.stacks_fd, all_threads=True, chain=False)
        # the stacks at a crash in native code go there too: nothing else would tell the line. Of all threads, for
        # gloo's own, which aborts where ranks do not agree on a shape, has no line of Python
        faulthandler.enable(file=place.stacks_fd, all_threads=True)
    if place.questions_fd is not None:
        questions = socket.socket(fileno=os.dup(place.questions_fd))
        # none that `threading` knows: some scripts wait for every thread in its list
        _thread.start_new_thread(_answer, (questions,))


def _answer(questions: socket.socket) -> None:
    while True:
        try:
            if not questions.recv(_QUESTION_BYTES):
                return
            answer = json.dumps(_told(), default=str).encode()
            questions.sendall(LENGTH.pack(len(answer)) + answer)
        except OSError:
            return


def _told() -> dict[str, Any]:
    """Return what this process knows of itself; what cannot be had must not keep the rest back."""
    try:
        compat = sys.modules.get("dure.torchcompat")
        collectives = [] if compat is None else compat.flight_record()[-MOST_COLLECTIVES:]
    except Exception as error:
        return {"collectives": [], "error": f"{type(error).__name__}: {error}"}
    return {"collectives": collectives}
