"""What a worker process does before it works and when it ends."""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from dure.rank import Place

_PR_SET_PDEATHSIG = 1


def run_in_child(entry: Callable[[], int], place: Place, log: Path | None, parent_pid: int) -> None:
    """Make this forked process a worker, run it, and end without going back into the parent's code.

    `os._exit` keeps the interpreter's shutdown from destroying torch's threads in an order that aborts: of plain
    finished DDP scripts about one in four ends with SIGABRT.
    """
    code = 1
    try:
        die_with_parent(parent_pid)
        redirect_output(log)
        os.environ.update(place.rank.to_environment())
        # what lives now belongs to the parent's copy: collecting it here would only touch and so copy its pages
        gc.freeze()
        code = entry()
    except BaseException:  # nothing may unwind into the supervisor's frames, which this process has a copy of
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent is gone, however that ended (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def redirect_output(log: Path | None) -> None:
    """Send what is printed to the rank's log; rank 0 (no log) keeps the terminal, its stdout joined to stderr.

    Results go to stdout, and a worker has none: `--json` must find nothing else there.
    """
    sys.stdout.flush()
    if log is None:
        os.dup2(2, 1)
    else:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    quiet_input = os.open(os.devnull, os.O_RDONLY)
    os.dup2(quiet_input, 0)
    os.close(quiet_input)
    # Python's own streams may be replaced by the caller (a notebook, a test): workers write to the descriptors
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
