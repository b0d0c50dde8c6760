"""Request to stop a run, made by a signal."""

import signal
import threading
import time
from types import FrameType
from typing import NoReturn, Self

from dure.process.stop_signals import end_if_unanswered, handled_signals, is_repeated_signal

_SECOND_AFTER_SECONDS = 0.5
"""Seconds within which a second signal is the same request: torchrun and a terminal deliver one Ctrl-C to every
rank."""


class StoppedAtOnce(BaseException):
    """Signal received while there is nothing to save, or second signal received without a supervisor."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


class StopSignals:
    """Conversion of stop signals into a request that the loop checks between steps.

    Before training begins there is nothing to save, and a signal stops this rank immediately. After `defer` no signal
    takes effect where it arrives, because ranks would stop at different steps. The loop makes all ranks agree instead.
    """

    def __init__(self, *, is_supervised: bool = False) -> None:
        self.received: int | None = None
        """Number of the first signal; None if none was received."""
        self.raised: int | None = None
        """Number of the signal for which `StoppedAtOnce` was raised, which native code may replace by its own error."""
        self._received_at = 0.0
        self._is_supervised = is_supervised
        self._is_deferred = False
        self._before: dict[int, object] = {}

    def defer(self) -> None:
        """Defer signals from now on to the next step."""
        self._is_deferred = True

    def __enter__(self) -> Self:
        # Python delivers signals to the main thread only; elsewhere the caller's handlers stay
        if threading.current_thread() is threading.main_thread():
            end_if_unanswered()
            self._before = {number: signal.signal(number, self._receive) for number in handled_signals()}
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_supervised:
            return  # this process is about to exit, and nothing may interrupt that
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._received_at = number, time.monotonic()
            if not self._is_deferred:
                self._stop_at_once(number)
            return
        seconds = time.monotonic() - self._received_at
        if self._is_supervised or seconds < _SECOND_AFTER_SECONDS or is_repeated_signal(number, seconds):
            return
        self._stop_at_once(self.received)  # a supervisor would kill this rank now

    def _stop_at_once(self, number: int) -> NoReturn:
        self.raised = number
        raise StoppedAtOnce(number)
