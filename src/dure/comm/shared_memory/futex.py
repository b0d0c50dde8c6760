"""Waiting for a word of shared memory to change, and waking who waits: Linux's futex (`man 2 futex`).

A waiter sleeps in the kernel and costs no core, which matters where more ranks than cores share a host, and it is
woken within microseconds, where the shortest `time.sleep` lasts 70.
"""

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable

_SYSTEM_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98}
"""Number of `futex` where a C long has 64 bits and the low half of a word comes first."""

_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1
_POLL_SECONDS = 50e-6


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _find_system_call() -> Callable[..., int] | None:
    if not sys.platform.startswith("linux") or platform.machine() not in _SYSTEM_CALLS:
        return None
    call = ctypes.CDLL(None).syscall
    call.restype = ctypes.c_long
    call.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
    return call


_call = _find_system_call()
_number = _SYSTEM_CALLS.get(platform.machine(), -1)
_keeps_order = platform.machine() == "x86_64"


def wait(address: int, value: int, seconds: float) -> None:
    """Sleep until another process wakes `address`, unless its word is not `value` any more; at most `seconds`.

    May return early. Without futex it is a short sleep, so that a caller who looks again in a loop works everywhere.

    Args:
        address: Of the word, whose low 32 bits count, in memory that all sides have mapped.
        value: What the caller saw there.
    """
    if _call is None:
        time.sleep(min(_POLL_SECONDS, seconds))
        return
    whole = int(seconds)
    limit = _Timespec(whole, int((seconds - whole) * 1e9))
    _call(_number, address, _WAIT, value & 0xFFFFFFFF, ctypes.addressof(limit))


def wake(address: int) -> None:
    """Wake all processes and threads that wait for the word at `address`."""
    if _call is not None:
        _call(_number, address, _WAKE, _EVERYBODY, None)


def fence(address: int) -> None:
    """Keep writes after this from being seen before those ahead of it; the same for reads.

    x86-64 keeps that order by itself (Intel SDM volume 3, 9.2.2). Elsewhere the kernel's own barrier in a wake that
    wakes no sleeper is used, since Python has no instruction for it.
    """
    if not _keeps_order:
        if _call is not None:
            _call(_number, address, _WAKE, 0, None)
        else:
            os.sched_yield()
