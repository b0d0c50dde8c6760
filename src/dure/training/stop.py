"""The wish to stop, as a signal leaves it."""

import signal
import threading
from types import FrameType
from typing import Self

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Turns SIGINT and SIGTERM into a wish that the loop sees between two steps.

    A signal is never acted on where it arrives: ranks would stop at different steps. The loop makes all ranks agree.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        """The first signal's number."""
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        # Python delivers signals to the main thread only; elsewhere the caller's handlers stay
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in _STOP_SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and self._before.get(number) is signal.default_int_handler:
            # nobody supervises: the second Ctrl-C stops at once
            raise KeyboardInterrupt
        self.received = self.received or number
