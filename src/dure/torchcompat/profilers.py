"""Profilers of torch, and an observer of those that a program constructs (`torch.autograd.profiler.profile`)."""

import functools
import os
from collections.abc import Callable
from typing import Any

from torch.autograd import _profiler_enabled, profiler

_LOG_LEVEL = "KINETO_LOG_LEVEL"


def initialise_profiler() -> None:
    """Load what torch's profiler needs, which takes seconds the first time, and let it print nothing by itself."""
    is_users = _LOG_LEVEL in os.environ
    os.environ.setdefault(_LOG_LEVEL, "99")
    try:
        # on the CPU alone: a device would be chosen before the program does
        with profiler.profile(use_cpu=True, use_kineto=True):
            pass
    finally:
        if not is_users:
            del os.environ[_LOG_LEVEL]


def is_profiling() -> bool:
    """Return whether a profiler of torch is on in this thread."""
    return bool(_profiler_enabled())


def observe_profilers(begin: Callable[[], None]) -> None:
    """Call `begin` before a profiler of torch is constructed, because two cannot be on at the same time."""
    construct: Callable[..., None] = profiler.profile.__init__

    @functools.wraps(construct)
    def observed(*args: Any, **settings: Any) -> None:
        begin()
        construct(*args, **settings)

    profiler.profile.__init__ = observed  # type: ignore[method-assign]
