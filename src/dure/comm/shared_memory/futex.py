"""Wait for a change of a word in shared memory, and wake-up of its waiters, by Linux's futex (`man 2 futex`).

A waiter sleeps in the kernel and occupies no core, which matters if more ranks than cores share a host. It is woken
within microseconds; the shortest `time.sleep` takes 70.
"""

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable

_SYSTEM_CALLS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98}
"""Number of the system call `futex` on platforms with a 64-bit C long and little-endian words."""

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
    """Sleep until another process wakes `address`, unless its word has changed from `value`; at most `seconds`.

    This may return early. Without futex it is a short sleep, so that a caller that checks in a loop works everywhere.

    Args:
        address: Address of the word, whose low 32 bits count, in memory that all sides have mapped.
        value: Value that the caller saw there.
        seconds: Maximum seconds to sleep.
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
    """Prevent later writes from becoming visible before earlier ones; the same for reads.

    x86-64 guarantees that order (Intel SDM volume 3, 9.2.2). Elsewhere the kernel's own barrier in a wake-up without
    sleepers is used, because Python has no instruction for it.
    """
    if not _keeps_order:
        if _call is not None:
            _call(_number, address, _WAKE, 0, None)
        else:
            os.sched_yield()
