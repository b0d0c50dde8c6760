"""Surroundings of a call: environment variables and files, restored after a trial of code that may change them."""

import builtins
import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from dure.strategies.state.objects.namespaces import is_users_module

_MOST_KEPT_BYTES = 64 * 2**20
"""Maximum bytes of a file whose content is kept before it is overwritten."""
_PASSED_ON = ("numpy", "pandas", "PIL", "torch.serialization")
"""Modules, other than Python's own, that open files on behalf of their callers."""


class Surroundings:
    """Environment variables and files that a user's code writes."""

    def __init__(self) -> None:
        self._environment = _environment()
        self._contents: dict[Path, bytes | None] = {}
        """Earlier contents of each file that was opened for writing; None for a file that did not exist."""
        self._lengths: dict[Path, int] = {}
        """Earlier length of each file that was opened for appending."""
        self._too_large: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the files that the user's code opens for writing, in this thread, with Python's `open`."""
        opened, thread = builtins.open, threading.get_ident()

        def noting(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            is_written = isinstance(mode, str) and set(mode) & set("wax+")
            is_named = isinstance(file, str | bytes | os.PathLike)
            if is_written and is_named and thread == threading.get_ident() and _is_for_user(sys._getframe(1)):
                with suppress(OSError, ValueError):  # opening it will raise the error
                    self._note(Path(os.fsdecode(file)).absolute(), is_appended="a" in mode)
            return opened(file, mode, *args, **kwargs)

        builtins.open = io.open = noting  # `Path.open` calls the latter
        try:
            yield
        finally:
            builtins.open = io.open = opened

    def _note(self, path: Path, *, is_appended: bool) -> None:
        if path in self._contents:
            return
        if not path.exists():
            self._contents[path] = None
        elif path.is_file():
            size = path.stat().st_size
            if is_appended:
                self._lengths.setdefault(path, size)
            elif size <= _MOST_KEPT_BYTES:
                self._contents[path] = path.read_bytes()[: self._lengths.pop(path, size)]
            else:
                self._too_large.append(f"file {path.name}")

    def written(self) -> list[str]:
        """Return the files that were opened for writing, and the environment variables that were set or removed."""
        return [
            *(f"file {path.name}" for path in sorted({*self._contents, *self._lengths})),
            *self._too_large,
            *self.set_variables(),
        ]

    def set_variables(self) -> list[str]:
        """Return the environment variables that were set or removed."""
        before, now = self._environment, _environment()
        if before == now:
            return []
        changed = sorted(os.fsdecode(name) for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        return [f"os.environ[{name!r}]" for name in changed]

    def put_back(self) -> list[str]:
        """Restore everything; return files and variables that cannot be restored."""
        self.put_back_variables()
        left = [*self._too_large]
        for path, content in self._contents.items():
            try:
                if content is None:
                    path.unlink(missing_ok=True)
                elif path.read_bytes() != content:
                    path.write_bytes(content)
            except OSError:
                left.append(f"file {path.name}")
        for path, length in self._lengths.items():
            try:
                if path.stat().st_size > length:
                    os.truncate(path, length)
            except OSError:
                left.append(f"file {path.name}")
        return left

    def put_back_variables(self) -> None:
        """Restore the environment variables."""
        if self._environment != _environment():
            os.environb.clear()
            os.environb.update(self._environment)


def _environment() -> dict[bytes, bytes]:
    """Return a copy of the environment variables, without decoding them one by one, which takes a hundred times longer.

    Their dictionary is private in Python.
    """
    return dict(os.environb._data)  # type: ignore[attr-defined]


def _is_for_user(frame: FrameType | None) -> bool:
    """Return whether a file is opened by a user's code, or by a module on its behalf."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        package = name.partition(".")[0]
        is_pythons = package in sys.stdlib_module_names and package != "__main__"
        if not is_pythons and not name.startswith(_PASSED_ON):
            module = sys.modules.get(name)
            return module is not None and is_users_module(module)
        frame = frame.f_back
    return False
