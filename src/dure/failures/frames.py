"""Frames of a traceback, and whether their files belong to the user's code or a library."""

import functools
import importlib.util
import linecache
import os
import stat
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

OWN_ROOT = f"{Path(__file__).absolute().parents[1]}{os.sep}"
"""Folder of dure's own modules as it appears in frames: without resolving links."""

_STANDARD_LIBRARY = tuple(
    {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)}
)
_TYPED = ("<stdin>", "<python-input-", "<ipython-input-")
"""Names of code typed into interpreters."""
_ENGINES = ("torch", "numpy")
_OF_PACKAGES = ("/site-packages/", "/dist-packages/")
"""Folders of installed packages; the second is Debian's, which containers for GPUs often have."""


def own_file(module: str) -> str:
    """Return the file of one of dure's modules as it appears in frames; a test checks that it exists.

    Args:
        module: Dotted name. It is not imported.
    """
    return f"{OWN_ROOT}{os.path.join(*module.split('.')[1:])}.py"


def own_folder(package: str) -> str:
    """Return the folder of one of dure's packages as it appears in frames, with a trailing separator."""
    return f"{OWN_ROOT}{os.path.join(*package.split('.')[1:])}{os.sep}"


def is_foreign(file: str) -> bool:
    """Return whether a file belongs to the user or an installed package, and not to dure, Python or torch."""
    if file.startswith(_TYPED):
        return True
    if file.startswith((OWN_ROOT, "<")) or is_of_engine(file):
        return False
    return not file.startswith(_STANDARD_LIBRARY) or is_installed(file)


@functools.cache
def is_of_engine(file: str) -> bool:
    """Return whether a file belongs to torch or numpy, wherever they are installed or built."""
    return file.startswith(_engine_folders()) or any(
        f"{folder}{name}/" in file for folder in _OF_PACKAGES for name in _ENGINES
    )


@functools.cache
def _engine_folders() -> tuple[str, ...]:
    folders = []
    for name in _ENGINES:
        with suppress(ValueError):  # a stand-in of a test has no spec
            if (spec := importlib.util.find_spec(name)) is not None and spec.origin is not None:
                folders.append(f"{os.path.dirname(spec.origin)}{os.sep}")
    return tuple(folders)


@functools.cache
def is_installed(file: str) -> bool:
    """Return whether a file belongs to an installed package, in an environment or one of `pip install --target`."""
    return any(folder in file for folder in _OF_PACKAGES) or any(
        inner.stem in _installed_names(str(outer))
        for inner, outer in pairwise([Path(file), *Path(file).parents])
        if str(outer) in sys.path
    )


@functools.cache
def _installed_names(folder: str) -> frozenset[str]:
    """Return the modules and packages that pip has installed into a folder, by its records."""
    names: set[str] = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        with suppress(OSError):
            lines = record.read_text(encoding="utf-8", errors="replace").splitlines()
            names.update(Path(line.partition(",")[0].partition("/")[0]).stem for line in lines)
    return frozenset(names)


def shown_name(file: str) -> str:
    """Return a file's name for display: a notebook's cell has a number."""
    with suppress(KeyError, AttributeError):  # there is no IPython, or one older than version 8
        label = sys.modules["IPython"].get_ipython().compile.format_code_name(file)
        return file if label is None else " ".join(label)
    return file


def users_first(files: list[str]) -> list[int]:
    """Return the indices of the user's files.

    The user's own code may itself be installed as a package. Files of installed packages therefore count if there are
    no others.
    """
    foreign = [index for index, file in enumerate(files) if is_foreign(file)]
    return [index for index in foreign if not is_installed(files[index])] or foreign


def frames_of(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an exception's traceback, the innermost last."""
    _leave_devices_unread(_files_of(error))
    return list(traceback.extract_tb(error.__traceback__))


def format_error(error: BaseException) -> str:
    """Format an exception as Python does, with those that it was raised from or in."""
    _leave_devices_unread(_files_of(error))
    return "".join(traceback.format_exception(error))


def source_line(file: str, number: int) -> str:
    """Return a line of a file, with its end; an empty text if there is none."""
    _leave_devices_unread([file])
    return linecache.getline(file, number)


def _files_of(error: BaseException) -> set[str]:
    files: set[str] = set()
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            files.update(frame.f_code.co_filename for frame, _ in traceback.walk_tb(one.__traceback__))
            waiting += [one.__cause__, one.__context__]
            waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
    return files


def _leave_devices_unread(files: Iterable[str]) -> None:
    """Keep `linecache`, and with it `traceback`, from files that may have no end, such as `/dev/zero` or a pipe.

    Code from `compile` may have any file name.
    """
    for file in files:
        with suppress(OSError, ValueError):  # there is no such file, or its name has a null byte
            if not stat.S_ISREG(os.stat(file).st_mode):
                linecache.cache[file] = (0, None, [], file)  # an entry without a modification time is not read again


def is_raise(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame of a traceback is at a `raise` statement, and not at a call of native code that raised."""
    line = source_line(frame.filename, frame.lineno or 0)
    return line.encode()[frame.colno or 0 :].lstrip().startswith(b"raise")


def from_here(file: str) -> str:
    """Return a file's path relative to the current folder if possible."""
    with suppress(ValueError):
        return str(Path(file).relative_to(Path.cwd()))
    return file


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Line of Python that a thread is executing."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Return the location, with the path relative to the current folder."""
        return f"{from_here(self.file)}:{self.line} in {self.function}"


def users_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of user code, given frames from the innermost outwards; None if there is none."""
    chosen = users_first([frame.file for frame in frames])
    return frames[chosen[0]] if chosen else None


def traceback_in_user_code(error: BaseException) -> str:
    """Format a traceback without the leading frames of dure, torch and the import system.

    Frames of libraries between the user's own are omitted; if there are no frames of the user, they are shown.
    """
    frames = [] if isinstance(error, SyntaxError) else frames_of(error)
    frames = [frame for frame in frames if not frame.filename.startswith((OWN_ROOT, "<frozen", "<string>"))]
    kept = [frame for frame in frames if not is_installed(frame.filename)] or frames
    shown = [
        frame if (name := shown_name(frame.filename)) == frame.filename else _renamed(frame, name) for frame in kept
    ]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(shown)] if shown else []
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()


def _renamed(frame: traceback.FrameSummary, name: str) -> traceback.FrameSummary:
    return traceback.FrameSummary(name, frame.lineno, frame.name, line=frame.line)
