"""Deaths of loader processes, reported where a batch is awaited and nowhere else."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class LoaderDeaths:
    """Handler of SIGCHLD that lets torch's handler raise only while a batch is awaited.

    By itself, torch's handler raises between any two instructions of this process. While state is restored after
    a trial, or inside code that may fail, that left the state partly restored, and training went on from it: a snapshot
    had other random numbers than the undisturbed run.
    """

    def __init__(self) -> None:
        self._torchs: Callable[[int, FrameType | None], Any] | None = None
        self._is_awaited = False
        self._error: RuntimeError | None = None

    def watch(self) -> None:
        """Take the place of torch's handler, once; called when loader processes have been started."""
        # a handler that a task has set since then may call this one, which must not call it in turn
        if self._torchs is not None or threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler):
            self._torchs = handler
            signal.signal(signal.SIGCHLD, self._handle)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise deaths inside the context, and those since the last one.

        Raises:
            RuntimeError: A loader process has ended; the message is torch's.
        """
        self._is_awaited = True
        try:
            error, self._error = self._error, None
            if error is not None:
                raise error.with_traceback(None)
            yield
        finally:
            self._is_awaited = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        assert self._torchs is not None
        try:
            self._torchs(number, frame)
        except RuntimeError as error:
            if self._is_awaited:
                raise
            self._error = error


LOADER_DEATHS = LoaderDeaths()
"""The only one of this process, which has one handler for the signal."""
