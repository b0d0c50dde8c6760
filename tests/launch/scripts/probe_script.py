"""The probe: what a script finds around it. Run by `python` and by `dure run`, it is to print the same."""

import atexit
import gc
import inspect
import io
import json
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import types
import typing

before = dict(globals())
annotated: int = 3


class Here:
    pass


def found() -> dict[str, object]:
    main = sys.modules["__main__"]
    names = ("__file__", "__name__", "__cached__", "__package__", "__doc__")
    streams = [(stream.name, stream.encoding, stream is own) for stream, own in _streams()]
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE, signal.SIGCHLD]
    return {
        **{name: repr(before.get(name, "missing")) for name in names},
        "spec": [getattr(before["__spec__"], name, None) for name in ("name", "origin", "parent", "cached")],
        "names": sorted(name for name in before if name.startswith("__")),
        "builtins": isinstance(before["__builtins__"], types.ModuleType),
        "loader": [type(before["__loader__"]).__name__, vars(before["__loader__"]).get("path")],
        "annotations": repr(typing.get_type_hints(main)),
        "argv": [sys.argv, sys.orig_argv],
        "path": sys.path,
        "flags": repr(sys.flags),
        "main": [repr(main), vars(main) is globals(), inspect.getfile(main), len(inspect.getsource(main))],
        "code": [found.__code__.co_filename, inspect.getsourcefile(found), traceback.extract_stack()[-1].filename],
        "pickle": repr(pickle.dumps(Here())),
        "signals": [repr(signal.getsignal(number)) for number in signals],
        "mask": repr(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "streams": streams,
        "stdin": sys.stdin.name,
        "hooks": [sys.excepthook is sys.__excepthook__, threading.excepthook is threading.__excepthook__],
        "more hooks": [sys.breakpointhook is sys.__breakpointhook__, sys.displayhook is sys.__displayhook__],
        "tracing": [sys.gettrace(), sys.getprofile()],
        "threads": [thread.name for thread in threading.enumerate()],
        "gc": [gc.isenabled(), gc.get_threshold()],
        "limits": [sys.getrecursionlimit(), os.getcwd(), os.umask(os.umask(0)), os.nice(0)],
    }


def _streams() -> list[tuple[typing.Any, object]]:
    return [(sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__)]


if __name__ == "__main__":
    atexit.register(print, "left last")
    atexit.register(print, "left first")
    told = {**found(), "errors": [sys.stdout.errors, sys.stderr.errors], "class": isinstance(sys.stdout, io.TextIOBase)}
    print(json.dumps(told, default=repr))
    print(random.random(), file=sys.stderr)
