"""Files of a run, private by default: created with the permissions of their folder, and never through a link.

A run's folder is created with mode 0700, or, if its owner shares it, with the mode that the umask permits. Files
created in it later take their mode from the folder, so that no setting has to be passed on, and `chmod` of the folder
determines the mode of new files.
"""

import errno
import os
import stat
from pathlib import Path

PRIVATE = 0o700
SHARED = 0o777
"""Mode of files that others may read as far as the umask permits."""


def make_folder(path: Path, *, exist_ok: bool = False) -> None:
    """Create a folder with the permissions of its parent.

    A link to a folder does not count as an existing one: its contents would be written elsewhere.

    Raises:
        OSError: The system cannot create it, or it is a link.
    """
    try:
        path.mkdir(mode=_mode(path.parent))
    except FileExistsError:
        if path.is_symlink():
            raise OSError(errno.ELOOP, "it is a link", str(path)) from None
        if not (exist_ok and path.is_dir()):
            raise


def open_own(path: Path | str, flags: int) -> int:
    """Open or create a file of a run, and return its descriptor; an opener for Python's `open`.

    A link in the file's place is refused: its creator could make the caller overwrite any of its own files.

    Raises:
        OSError: The system cannot open it, or it is a link.
    """
    folder = os.path.dirname(path) or "."
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, _mode(folder) & 0o666)


def restrict_files(folder: Path) -> None:
    """Take from the files in a folder, which a library created there, the permissions that the folder does not give.

    Raises:
        OSError: The system cannot read the folder or change a mode.
    """
    for path in folder.iterdir():
        found = path.lstat().st_mode
        if stat.S_ISREG(found):
            path.chmod(found & _mode(folder) & 0o666)


def touch(path: Path) -> None:
    """Create an empty file if there is none.

    Raises:
        OSError: The system cannot create it, or there is a link in its place.
    """
    os.close(open_own(path, os.O_WRONLY | os.O_CREAT))


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk; only then are created or renamed files certain to be found again."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mode(folder: Path | str) -> int:
    return stat.S_IMODE(os.stat(folder).st_mode) & SHARED
