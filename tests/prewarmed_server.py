"""Runs commands in forks of one process that has imported torch already: a `dure train` costs tenths of a second.

Reads one JSON request per line: `argv` for `dure`, or for `script`, a Python file, with `cwd`, `env` and `output`, the
prefix of two files. Answers `{"pid": ...}`, and `{"pid": ..., "code": ...}` when that command has ended.
"""

import atexit
import gc
import json
import os
import runpy
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


def serve() -> tuple[str, Any] | None:
    """Fork a child per request; return twice: None in the server at the end, what to run in each child."""
    pidfds: dict[int, int] = {}
    poll = select.poll()
    poll.register(0, select.POLLIN)
    requests = os.fdopen(0, "rb", buffering=0, closefd=False)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in pidfds:
                poll.unregister(descriptor)
                pid = pidfds.pop(descriptor)
                answer(pid=pid, code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(descriptor)
                continue
            line = requests.readline()
            if not line:
                return None
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                return become(request)
            pidfd = os.pidfd_open(pid)
            pidfds[pidfd] = pid
            poll.register(pidfd, select.POLLIN)
            answer(pid=pid)


def answer(**fields: int) -> None:
    print(json.dumps(fields), flush=True)


def become(request: dict[str, Any]) -> tuple[str, Any]:
    """Make this fork what a shell would have started: own session, output, folder and environment."""
    os.setsid()
    for descriptor, name in ((1, "out"), (2, "err")):
        file = os.open(f"{request['output']}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.update({"TMPDIR": request["cwd"], **request["env"]})
    tempfile.tempdir = None  # look again where temporary files go: what is left of them is left there
    if "script" in request:
        sys.argv = [request["script"], *request["argv"]]
        sys.path[0] = str(Path(request["script"]).parent)
        return "script", request["script"]
    sys.argv = ["dure", *request["argv"]]
    return "dure", None


def leave_after(run: Callable[[], object]) -> None:
    """Run, and end as multiprocessing ends its forks: to take a whole interpreter down costs half a second."""
    code: object = None
    try:
        run()
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int | None):
            raise
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            raise SystemExit(code) from None  # as Python says it
    os._exit(code or 0)


if __name__ == "__main__":
    import dure.cli.train
    import dure.comm.dure_shm.backend
    import dure.data
    import dure.report.tables
    import dure.strategies.data_parallel.ddp
    import dure.training.worker
    from dure.torchcompat.imports import import_late_parts

    import_late_parts()
    gc.freeze()  # what lives now is the server's: collecting it in a fork would only touch and so copy its pages
    answer(pid=os.getpid())
    todo = serve()
    if todo is not None:
        kind, what = todo
        if kind == "script":
            leave_after(lambda: runpy.run_path(what, run_name="__main__"))
        else:
            leave_after(lambda: sys.exit(dure.cli.main()))
