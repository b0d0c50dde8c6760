"""Forwarding of a supervisor's stop signals to its ranks."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType

from dure.launch.worker.worker_process import Worker
from dure.process.stop_signals import end_if_unanswered, handled_signals, is_repeated_signal


class StoppedBeforeStart(BaseException):
    """Signal that arrived while there was no rank."""


@dataclass
class SignalForwarding:
    """Stop signals received while they are forwarded, and the effect of the first one if there is no rank."""

    received: list[int] = field(default_factory=list)
    """Numbers of the signals, in the order of arrival."""
    interrupts: bool = False
    """True if the next one that arrives while there is no worker raises `StoppedBeforeStart`: only code that is
    prepared for it sets this, and it happens once.
    """

    def interrupt_from_here(self) -> None:
        """Raise `StoppedBeforeStart` for signals from now on, and for one that has already arrived."""
        self.interrupts = not self.received
        if self.received:
            raise StoppedBeforeStart


@contextmanager
def passing_signals_on(workers: list[Worker], until: ExitStack | None = None) -> Iterator[SignalForwarding]:
    """Forward stop signals to workers, where the second one kills them; yield the received ones.

    Args:
        workers: Workers, in a list that may change.
        until: Stack that closes when the workers' end is on record. Signals that arrive before that, after the
            context, are delivered then, unless the stack closes because of an exception.
    """
    forwarding = SignalForwarding()
    received = forwarding.received
    first_at = 0.0

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal first_at
        if received and is_repeated_signal(number, time.monotonic() - first_at):
            return
        first_at = first_at or time.monotonic()
        received.append(number)
        if workers:
            pass_on_signal(number, workers, is_first=len(received) == 1)
        elif forwarding.interrupts:
            forwarding.interrupts = False
            raise StoppedBeforeStart

    def pause(number: int, frame: FrameType | None) -> None:
        for worker in workers:  # they may be in separate groups, which Ctrl-Z does not reach
            worker.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for worker in workers:
            worker.send(signal.SIGCONT)

    if threading.current_thread() is not threading.main_thread():
        yield forwarding
        return
    end_if_unanswered()
    before = {number: signal.signal(number, pass_on) for number in handled_signals()}
    # if children are not waited for (SIG_IGN), their exit codes would be lost
    if signal.getsignal(signal.SIGTSTP) == signal.SIG_DFL:
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, pause)
    before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def restore() -> None:
        for number, handler in before.items():
            # None: a handler that was not set from Python, and cannot be restored from it
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    try:
        yield forwarding
    finally:
        workers.clear()
        num_passed_on = len(received)
        if until is None:
            restore()
        else:
            until.push(lambda kind, *_: _deliver_late(restore, received[num_passed_on:], is_failing=kind is not None))


def _deliver_late(restore: Callable[[], None], late: list[int], *, is_failing: bool) -> None:
    restore()
    if late and not is_failing:
        signal.raise_signal(late[0])


def pass_on_signal(number: int, workers: list[Worker], *, is_first: bool) -> None:
    """Stop workers, or kill them if they were asked to stop before."""
    for worker in workers:
        if not is_first:
            worker.stop_at_once()
        else:
            # a rank at the terminal has received its Ctrl-C
            has_it = worker.keeps_terminal and number == signal.SIGINT and _is_in_foreground()
            worker.ask_to_stop(number, is_sent=not has_it)


def _is_in_foreground() -> bool:
    """Return whether this process is in the terminal's foreground group, which receives Ctrl-C."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


@contextmanager
def signals_put_off() -> Iterator[None]:
    """Deliver a stop signal after the context; an exception that ends the context takes precedence.

    With handlers, because a signal that the main thread blocks is delivered to another thread, such as those of
    libraries.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def put_off(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, put_off) for number in handled_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if received:
        signal.raise_signal(received[0])
