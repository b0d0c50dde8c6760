"""Module `__main__` of a rank, set up as by `python script.py` and `python -m module`."""

import builtins
import gc
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType, TracebackType

from dure.failures.frames import OWN_ROOT
from dure.terminal import print_traceback


def run_as_main(target: str, *, is_module: bool) -> None:
    """Run a script, a folder or archive with a `__main__.py`, or a module, in a fresh `__main__` that stays.

    Args:
        target: Argument of `python` or of `python -m`. `sys.argv[0]` is set already.
        is_module: Whether it is a module's name.
    """
    launched_from = {os.getcwd(), os.path.dirname(os.path.realpath(sys.argv[0]))}
    main = ModuleType("__main__")
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # its name in processes spawned by multiprocessing
        sys.modules["__mp_main__"] = main
    # as in runpy: absolute, but neither normalised nor without links
    path = os.path.join(os.getcwd(), target)
    sys.argv[0] = target
    if is_module:
        _put_first(os.getcwd(), launched_from)
        # the function that the interpreter itself calls for -m
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]
    elif pkgutil.get_importer(path) is not None:
        _put_first(path, launched_from, is_needed=True)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        _put_first(os.path.dirname(os.path.realpath(path)), launched_from)
        loader = SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader
        vars(main).update(__file__=path, __cached__=None, __loader__=loader("__main__", path))
        exec(_code_of(path), vars(main))  # noqa: S102


def _put_first(folder: str, launched_from: set[str], *, is_needed: bool = False) -> None:
    """Insert a folder at the position of the one from which dure was started."""
    if not sys.flags.safe_path and sys.path and sys.path[0] in launched_from:
        del sys.path[0]
    if is_needed or not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _code_of(path: str) -> CodeType:
    with io.open_code(path) as file:
        code: CodeType | None = pkgutil.read_code(file)
        if code is not None:
            return code
    with io.open_code(path) as file:
        text = file.read()
    try:
        source: CodeType = compile(text, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # the latter of null bytes, before Python 3.11.4
        if isinstance(error, SyntaxError) and error.filename is not None:
            raise
        raise SyntaxError(str(error), (path, 1, None, None)) from None
    return source


def traceback_of_main(error: BaseException) -> TracebackType | None:
    """Return an exception's traceback without the frames above the script; None if no line of it ran."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename.startswith((OWN_ROOT, "<frozen runpy")):
        found = found.tb_next
    return found


def exit_code_of(leave: SystemExit) -> int:
    """Return Python's exit code for a `SystemExit`, and print its message if it has one."""
    if leave.code is None:
        return 0
    if isinstance(leave.code, int):
        return leave.code & 0xFF if -(2**63) <= leave.code < 2**63 else 0xFF
    print_traceback(str(leave.code))
    return 1


_MORE_FILES = (("tempfile", "_TemporaryFileWrapper"), ("zipfile", "ZipFile"))
"""Classes that do not derive from files, but are finished by closing them."""


def finish_files(marker: list[object]) -> None:
    """Flush files that the script left open, as the interpreter does when it shuts down.

    Args:
        marker: Object that is as old as the script. Older objects are not the script's, and `gc.freeze` hides them.
    """
    if not any(each is marker for each in gc.get_objects()):  # the script called gc.freeze too, as some do to save time
        gc.unfreeze()
    standard = {id(stream) for name in ("stdin", "stdout", "stderr") for stream in _layers(getattr(sys, name))}
    more = [getattr(sys.modules.get(module), name, None) for module, name in _MORE_FILES]
    found = [
        each
        for each in gc.get_objects()
        if (issubclass(type(each), io.TextIOBase | io.BufferedIOBase) or type(each) in more)
        and id(each) not in standard
    ]
    for each in sorted(found, key=lambda each: _turn(type(each))):
        with suppress(Exception):
            # gzip, zipfile and the like write the end of a file only when they are closed
            each.close() if _turn(type(each)) == 1 else each.flush()


def _turn(kind: type) -> int:
    """Return a file's position in the order: files that write into others come first."""
    if issubclass(kind, io.TextIOBase):
        return 0
    return 2 if kind.__module__ == "_io" else 1


def _layers(stream: object) -> Iterator[object]:
    """Yield a stream and those below it; a script's replacement may contain itself."""
    seen: set[int] = set()
    while stream is not None and id(stream) not in seen:
        seen.add(id(stream))
        yield stream
        stream = getattr(stream, "buffer", None) or getattr(stream, "raw", None)
