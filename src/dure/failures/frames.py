"""Frames of a traceback, and whether their files are the user's code or a library's."""

import os
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

OWN_ROOT = f"{Path(__file__).absolute().parents[1]}{os.sep}"
"""Folder of dure's own modules, as it stands in frames: links on the way to it are not followed."""

_STANDARD_LIBRARY = tuple(
    {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)}
)
_TYPED = ("<stdin>", "<python-input-", "<ipython-input-")
"""Names that interpreters give to what is typed into them."""
_ENGINES = tuple(f"site-packages/{name}/" for name in ("torch", "numpy"))


def own_file(module: str) -> str:
    """Return the file of one of dure's modules, as it stands in frames; a test sees to it that there is one.

    Args:
        module: Its dotted name. It is not imported.
    """
    return f"{OWN_ROOT}{os.path.join(*module.split('.')[1:])}.py"


def own_folder(package: str) -> str:
    """Return the folder of one of dure's packages, with a separator at its end, as `own_file` does a module's file."""
    return f"{OWN_ROOT}{os.path.join(*package.split('.')[1:])}{os.sep}"


def is_foreign(file: str) -> bool:
    """Return whether a file is neither dure's nor Python's nor torch's, and so the user's or an installed package's."""
    if file.startswith(_TYPED):
        return True
    if file.startswith((OWN_ROOT, "<")) or any(engine in file for engine in _ENGINES):
        return False
    return not file.startswith(_STANDARD_LIBRARY) or "site-packages" in file


def shown_name(file: str) -> str:
    """Return a file's name for people: a notebook's cell has a number."""
    with suppress(KeyError, AttributeError):  # there is none, or one older than version 8
        label = sys.modules["IPython"].get_ipython().compile.format_code_name(file)
        return file if label is None else " ".join(label)
    return file


def users_first(files: list[str]) -> list[int]:
    """Return which of some files are the user's, as indices.

    What the user runs may itself be installed as a package: only where no file lies outside `site-packages` do those
    inside count.
    """
    foreign = [index for index, file in enumerate(files) if is_foreign(file)]
    return [index for index in foreign if "site-packages" not in files[index]] or foreign


def from_here(file: str) -> str:
    """Return a file's path as one would type it in the current folder."""
    with suppress(ValueError):
        return str(Path(file).relative_to(Path.cwd()))
    return file


@dataclass(frozen=True, kw_only=True)
class Frame:
    """A line of Python that a thread is in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Say where it is, with the path as one would type it from here."""
        return f"{from_here(self.file)}:{self.line} in {self.function}"


def users_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of the user's code, of frames that begin with the innermost."""
    chosen = users_first([frame.file for frame in frames])
    return frames[chosen[0]] if chosen else None


def traceback_in_user_code(error: BaseException) -> str:
    """Format a traceback without dure's, torch's and the import system's own frames in front.

    Frames of libraries between the user's own are kept out; if nothing of the user's is in it, theirs are shown.
    """
    frames = [] if isinstance(error, SyntaxError) else list(traceback.extract_tb(error.__traceback__))
    frames = [frame for frame in frames if not frame.filename.startswith((OWN_ROOT, "<frozen", "<string>"))]
    kept = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    shown = [
        frame if (name := shown_name(frame.filename)) == frame.filename else _renamed(frame, name) for frame in kept
    ]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(shown)] if shown else []
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()


def _renamed(frame: traceback.FrameSummary, name: str) -> traceback.FrameSummary:
    return traceback.FrameSummary(name, frame.lineno, frame.name, line=frame.line)
