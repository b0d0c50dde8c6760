"""Exceptions that can be told: what a class of exceptions defines is any code, which may itself fail or take long."""

import threading
from collections.abc import Callable
from contextlib import suppress

from dure.errors import DureError

MOST_SECONDS = 3.0
"""Seconds within which an exception must have been told; a message of 50 MB takes half a second."""


def is_done_in_time(action: Callable[[], object], seconds: float) -> bool:
    """Run an action in another thread, and return whether it ended in time and without an exception.

    A thread that has not ended is left to itself.
    """
    is_done, has_ended = False, threading.Event()

    def run() -> None:
        nonlocal is_done
        with suppress(BaseException):
            action()
            is_done = True
        has_ended.set()

    try:
        threading.Thread(target=run, name="dure-telling", daemon=True).start()
    except RuntimeError:  # no thread can be started
        return True
    has_ended.wait(seconds)
    return is_done


def tellable(error: BaseException, tell: Callable[[BaseException], object]) -> BaseException:
    """Return an exception, or another in its place if code of its class or its notes keeps it from being told.

    Args:
        error: Exception. One that asks this process to end is returned as it is.
        tell: Runs all code that telling it will run.
    """
    if issubclass(type(error), DureError) or not issubclass(type(error), Exception):
        return error
    if is_done_in_time(lambda: tell(error), MOST_SECONDS):
        return error
    kind = type(type(error).__name__, (Exception,), {"__module__": type(error).__module__})
    found = kind(f"its message cannot be told, because code of its class failed or took over {MOST_SECONDS:g} s")
    found.__traceback__ = BaseException.__dict__["__traceback__"].__get__(error)
    return found  # type: ignore[no-any-return]
