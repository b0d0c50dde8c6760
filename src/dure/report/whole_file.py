"""Files that appear completely or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dure.errors import Misuse


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a path to write to; afterwards its file takes the place of `path`, or is removed if writing failed.

    Raises:
        Misuse: The system refuses the file.
    """
    new = path.parent / f".{path.name}.{os.getpid()}.writing"
    try:
        new.unlink(missing_ok=True)  # a link in its place would be followed
        try:
            yield new
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise Misuse(f"{path} cannot be written ({error.strerror}): give a file that can be written") from None
