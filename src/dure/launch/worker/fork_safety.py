"""Safety of forking this process into workers that compute."""

import os
import sys
import threading

from dure.host.device_kinds import reason_fork_would_lose_devices


def reason_not_to_fork() -> str | None:
    """Return the reason why a forked child could hang or fail here, or None if there is none.

    A fork copies only one thread: locks held by others stay locked, and OpenMP's pool in the child waits for threads
    that do not exist. The runtimes of devices do not survive a fork at all.
    """
    if not sys.platform.startswith("linux"):
        return f"forking is not safe on {sys.platform}"
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others and not is_kernel():
        return f"Python threads are running ({', '.join(others[:3])})"
    return reason_fork_would_fail(threads=2)


def is_kernel() -> bool:
    """Return whether this process is the kernel of a notebook.

    It always has threads, and `multiprocessing` and the shell commands of cells fork it all the time. A fresh
    interpreter would not have the definitions of its cells.
    """
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_shell is not None and getattr(get_shell(), "kernel", None) is not None


def reason_fork_would_fail(threads: int) -> str | None:
    """Return the reason why a forked child that computes with `threads` threads certainly fails or hangs, or None.

    Python threads are no such reason: only the user who requests a fork can know whether one holds a lock at the wrong
    moment.
    """
    if "torch" in sys.modules and (reason := reason_fork_would_lose_devices()) is not None:
        return reason
    if threads > 1 and _has_openmp_threads():
        return "torch has already computed with several threads in this process"
    return None


def _has_openmp_threads() -> bool:
    """Return whether a thread of this process sleeps inside an OpenMP library.

    The kernel provides the instruction at which a thread sleeps, and the memory map the library. NumPy's OpenBLAS
    threads, which survive a fork, sleep in libc instead.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            libraries = [
                tuple(int(edge, 16) for edge in line.split(maxsplit=1)[0].split("-"))
                for line in file
                if "libgomp" in line or "libomp" in line or "libiomp" in line
            ]
        for thread in os.listdir("/proc/self/task"):
            if int(thread) == threading.get_native_id():
                continue
            with open(f"/proc/self/task/{thread}/syscall", encoding="ascii") as file:
                words = file.read().split()
            if words[0] == "running":
                return True
            where = int(words[-1], 16)
            if any(start <= where < end for start, end in libraries):
                return True
    except (OSError, ValueError):
        return "torch" in sys.modules
    return False
