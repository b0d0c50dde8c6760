"""Fencing for runs on several hosts: only the leader of the newest term may write.

A term is an empty file in the run's folder, made only where there is none. So hosts that cannot reach each other, but
see the same folder, agree: who leads begins a term, and who finds a later one than its own leads no more.
"""

import os
from pathlib import Path

from dure.errors import CheckpointNotWritten
from dure.own_files import make_folder, open_own

FOLDER = ".leader"
_FILE = "epoch-"
"""Beginning of a file's name, as runs that were begun before know it."""


def newest_term(run: Path) -> int:
    """Return the number of the last term that a node began; 0 where none did."""
    try:
        names = os.listdir(run / FOLDER)
    except OSError:
        return 0
    numbers = (name.removeprefix(_FILE) for name in names if name.startswith(_FILE))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def begin_term(run: Path, term: int) -> bool:
    """Begin a term; False when another has begun it."""
    make_folder(run / FOLDER, exist_ok=True)
    try:
        os.close(open_own(run / FOLDER / f"{_FILE}{term}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def refuse_if_over(run: Path, term: int | None) -> None:
    """Refuse to write where a later term has begun.

    Args:
        run: The folder.
        term: The one in which the caller was started; None for a run of one host.

    Raises:
        CheckpointNotWritten: Another node leads the run now.
    """
    if term is not None and newest_term(run) > term:
        raise CheckpointNotWritten(
            f"another node leads {run.name} since nothing was seen of this one, so nothing is written here any more"
        )
