"""Checkpoints that an observed script writes, which are put back as they were before.

Otherwise a proof would overwrite those of the user, and one process would go on from what the ranks have just written.
"""

import functools
import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

_FOLDER = "checkpoints"
"""Folder of the files as they were, inside that of an observed run."""


def keep_checkpoints(folder: Path, rank: int) -> None:
    """Keep every file before the script writes it by `torch.save` or safetensors, or renames such a file to it."""
    kept = _KeptFiles(folder, rank)
    save = _before(torch.save, 1, "f", kept.keep)
    torch.save = torch.serialization.save = save
    safetensors.torch.save_file = _before(safetensors.torch.save_file, 1, "filename", kept.keep)
    for name in ("rename", "replace"):
        setattr(os, name, _renaming(getattr(os, name), kept))


def _before(write: Callable[..., Any], place: int, name: str, keep: Callable[[Any], None]) -> Any:
    """Return a function that calls another with the argument for its file first."""

    @functools.wraps(write)
    def writing(*args: Any, **settings: Any) -> Any:
        keep(args[place] if len(args) > place else settings.get(name))
        return write(*args, **settings)

    return writing


def _renaming(rename: Callable[..., Any], kept: "_KeptFiles") -> Any:
    @functools.wraps(rename)
    def renaming(source: Any, target: Any, **settings: Any) -> Any:
        if kept.has(source):
            kept.keep(target)
        return rename(source, target, **settings)

    return renaming


class _KeptFiles:
    """Files as they were before the script wrote them; each is kept once, by the first rank that writes it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._own, self._folder, self._rank = os.path.realpath(folder), folder / _FOLDER, rank
        self._written: set[str] = set()
        self._rename = os.rename

    def has(self, path: Any) -> bool:
        """Return whether this rank has written a file."""
        return isinstance(path, str | os.PathLike) and os.path.realpath(path) in self._written

    def keep(self, path: Any) -> None:
        """Keep a file that is about to be written; a stream is none."""
        if not isinstance(path, str | os.PathLike):
            return
        real = os.path.realpath(os.fspath(path))
        if not isinstance(real, str) or real in self._written or real.startswith(self._own):
            return
        self._written.add(real)
        with suppress(OSError):
            place = self._folder / hashlib.blake2b(real.encode(), digest_size=16).hexdigest()
            if place.exists():
                return
            own = place.with_name(f"{place.name}.{self._rank}")
            own.mkdir(parents=True)
            (own / "path").write_text(real)
            if os.path.isfile(real):
                shutil.copy2(real, own / "file")
            try:
                self._rename(own, place)  # fails if another rank was first, which may be writing by now
            except OSError:
                shutil.rmtree(own, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Put back what the ranks of an observed run have overwritten, and remove what was not there before."""
    for place in (folder / _FOLDER).glob("*"):
        with suppress(OSError):
            path = Path((place / "path").read_text())
            if "." in place.name:  # of a rank that was ended before another had kept it, or since
                continue
            if (place / "file").exists():
                shutil.copy2(place / "file", path)
            else:
                path.unlink()
