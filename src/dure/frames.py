"""Whose code a file is: the user's, or what the user's code stands on."""

import os
import sysconfig
import traceback
from pathlib import Path

OWN_ROOT = f"{Path(__file__).resolve().parent}{os.sep}"
"""Where dure's own modules are."""

_STANDARD_LIBRARY = tuple(
    {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.dirname(os.__file__)}
)
_ENGINES = tuple(f"site-packages/{name}/" for name in ("torch", "numpy"))


def is_foreign(file: str) -> bool:
    """Whether a file is neither dure's nor Python's nor torch's, and so the user's or an installed package's."""
    if file.startswith((OWN_ROOT, "<")) or any(engine in file for engine in _ENGINES):
        return False
    return not file.startswith(_STANDARD_LIBRARY) or "site-packages" in file


def users_first(files: list[str]) -> list[int]:
    """Return which of some files are the user's, as indices.

    What the user runs may itself be installed as a package: only where no file lies outside `site-packages` do those
    inside count.
    """
    foreign = [index for index, file in enumerate(files) if is_foreign(file)]
    return [index for index in foreign if "site-packages" not in files[index]] or foreign


def traceback_in_user_code(error: BaseException) -> str:
    """Format a traceback without dure's, torch's and the import system's own frames in front.

    Frames of libraries between the user's own are kept out; if nothing of the user's is in it, all is shown.
    """
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((OWN_ROOT, "<frozen")) and "site-packages" not in frame.filename
    ]
    if isinstance(error, SyntaxError):
        frames = []
    kept = frames or ([] if isinstance(error, SyntaxError) else list(traceback.extract_tb(error.__traceback__)))
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(kept)] if kept else []
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()
