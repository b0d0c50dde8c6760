"""Signals that request an orderly stop of a run, and the exit codes after them."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Stop signals. SIGHUP is sent when a terminal or connection closes, and SIGUSR1 by clusters before they take a machine
away.
"""

HELD_SIGNALS = (*STOP_SIGNALS, signal.SIGTSTP)
"""Signals blocked while a process is started; SIGTSTP is Ctrl-Z, which stops a supervisor and the ranks it knows."""

RESUMABLE = 75
"""Exit code EX_TEMPFAIL of sysexits.h: stopped in favour of something else, start it again later."""

ONE_WISH_SECONDS = 1.0
"""Seconds within which programs, unlike impatient users, may send a signal twice for one request."""

_unanswered: list[int] = []


class Terminated(KeyboardInterrupt):
    """Stop signal that the program does not handle otherwise: it ends a command as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__()


def end_by(number: int) -> NoReturn:
    """End a command because of a stop signal: from anywhere, even from within an import."""
    _unanswered.append(number)
    raise Terminated(number)


def end_if_unanswered() -> None:
    """End if a stop signal arrived and this still runs: some code, such as a library's import, caught everything."""
    if _unanswered:
        raise Terminated(_unanswered[0])


def forget_stop() -> None:
    """Forget the received signal, for the next command of this process."""
    _unanswered.clear()


def stop_exit_code(number: int) -> int:
    """Return the exit code of a command that stopped because of a signal."""
    return RESUMABLE if number == signal.SIGUSR1 else 128 + number


def signal_name(number: int) -> str:
    """Return a signal's name; signals without one are counted from SIGRTMIN."""
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"
    return signal.Signals(number).name


def handled_signals() -> tuple[signal.Signals, ...]:
    """Return the stop signals that this process does not ignore: `nohup` ignores SIGHUP."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if not (ignores_hangup and number == signal.SIGHUP))


def is_repeated_signal(number: int, seconds_since_first: float) -> bool:
    """Return whether a stop signal after the first one only repeats it, and does not show impatience.

    `timeout` sends its signal to the command and then to its whole group. When a terminal closes, both the shell and
    the system send a signal. Slurm sends SIGTERM to all processes of a job that has to go, and srun, which is one of
    them, forwards it; after a grace time it sends SIGTERM once more. To end a job without further waiting it uses
    SIGKILL.

    Args:
        number: The later signal.
        seconds_since_first: Time between the two.
    """
    if number != signal.SIGINT and seconds_since_first < ONE_WISH_SECONDS:
        return True
    return number == signal.SIGTERM and "SLURM_JOB_ID" in os.environ


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Block the stop signals and Ctrl-Z in this thread; they are delivered afterwards.

    A process that is started inside begins with them blocked: a signal to its whole group does not end it before it has
    installed its handlers.

    The system delivers a signal that one thread blocks to another, such as those of libraries, and Python still calls
    its handler in the main thread. So there the handlers are deferred too.
    """
    held: list[int] = []
    is_over = False

    def hold(number: int, frame: FrameType | None) -> None:
        if is_over:  # a restored handler has raised before the next one was restored
            handlers[signal.Signals(number)](number, frame)
        else:
            held.append(number)

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    # only Python's: a program that is started inside must ignore what this process ignores
    is_main = threading.current_thread() is threading.main_thread()
    found = {number: signal.getsignal(number) for number in HELD_SIGNALS} if is_main else {}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    try:
        # inside the `try`: a signal just before may raise from within the call that blocks them
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)
        for number in handlers:
            signal.signal(number, hold)
        yield
    finally:
        is_over = True
        try:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for each in held:
            signal.raise_signal(each)
