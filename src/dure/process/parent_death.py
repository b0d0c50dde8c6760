"""Link between the life of a process and that of its parent."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent is gone, however that ended (Linux).

    Strictly, when the *thread* that started it is gone: use it only for processes started by the main thread, or by a
    thread that waits for them.

    Args:
        parent_pid: Process that started this one. If it is no longer the parent, it died before this call.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
