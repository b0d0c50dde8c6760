"""Files of a run as their owner's alone: made as readable as the folder that they are in, and never through a link.

A run's folder is made with mode 0700, or, if its owner shares it, with what the umask lets through. Whatever is made in
it later asks the folder, so that no setting has to be passed on, and `chmod` of the folder decides about new files.
"""

import errno
import os
import stat
from pathlib import Path

PRIVATE = 0o700
SHARED = 0o777
"""Mode of what others may read as far as the umask lets them."""


def make_folder(path: Path, *, exist_ok: bool = False) -> None:
    """Make a folder that is as readable as the one that it is in.

    A link to a folder is not taken for one that exists: what is written into it would be written elsewhere.

    Raises:
        OSError: The system does not make it, or it is a link.
    """
    try:
        path.mkdir(mode=_mode(path.parent))
    except FileExistsError:
        if path.is_symlink():
            raise OSError(errno.ELOOP, "it is a link", str(path)) from None
        if not (exist_ok and path.is_dir()):
            raise


def open_own(path: Path | str, flags: int) -> int:
    """Open a file of a run, or make one, and return its descriptor; for `open` of Python an opener.

    A link in the file's place is refused: it would let its maker have any file of the caller's written.

    Raises:
        OSError: The system does not open it, or it is a link.
    """
    folder = os.path.dirname(path) or "."
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, _mode(folder) & 0o666)


def touch(path: Path) -> None:
    """Make an empty file where none is.

    Raises:
        OSError: The system does not make it, or a link is in its place.
    """
    os.close(open_own(path, os.O_WRONLY | os.O_CREAT))


def _mode(folder: Path | str) -> int:
    return stat.S_IMODE(os.stat(folder).st_mode) & SHARED
