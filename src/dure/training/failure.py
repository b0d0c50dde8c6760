"""What a rank writes down when it fails, for the verdict over all ranks."""

import os
import socket
import time
import traceback
from pathlib import Path
from typing import Any

from dure.comm.groups import is_peer_lost
from dure.errors import DureError, Misuse
from dure.training.load_task import traceback_in_user_code

_OWN_ROOT = str(Path(__file__).resolve().parents[1])


def describe_failure(error: BaseException, rank: int, step: int | None) -> dict[str, Any]:
    """Return a failure as a record: who, when, where in the user's code, and whether it is only a consequence."""
    is_ours = isinstance(error, DureError)
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "time": time.time(),
        "step": step,
        "type": type(error).__name__,
        "message": str(error),
        "exit_code": error.exit_code if isinstance(error, DureError) else 1,
        "is_ours": is_ours,
        "is_misuse": isinstance(error, Misuse),
        "is_consequence": is_peer_lost(error),
        "user_line": _user_line(error),
        "user_traceback": None if is_ours else traceback_in_user_code(error),
        "traceback": "".join(traceback.format_exception(error)),
    }


def _user_line(error: BaseException) -> dict[str, Any] | None:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OWN_ROOT, "<"))
        and "site-packages" not in frame.filename
        and "/lib/python" not in frame.filename
    ]
    if not frames:
        return None
    last = frames[-1]
    return {"file": last.filename, "line": last.lineno, "function": last.name, "text": last.line}
