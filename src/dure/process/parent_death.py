"""A process's tie to the one that started it."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent is gone, however that ended (Linux).

    Strictly, when the *thread* that started it is gone: only for processes that the main thread starts, or a thread
    that waits for them.

    Args:
        parent_pid: Who started this process. If that is not the parent any more, it died before this call.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
