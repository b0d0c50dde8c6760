"""Fencing for runs on several hosts: only the leader of the newest term may write.

A term is an empty file in the run's folder, created only if there is none. Hosts that cannot reach each other but see
the same folder therefore agree: a leader begins a term, and a node that finds a later term than its own no longer
leads.
"""

import os
from pathlib import Path

from dure.errors import CheckpointNotWritten
from dure.own_files import make_folder, open_own

FOLDER = ".leader"
_FILE = "epoch-"
"""Prefix of the file names, the same as in runs of earlier versions."""


def newest_term(run: Path) -> int:
    """Return the number of the newest term; 0 if there is none."""
    try:
        names = os.listdir(run / FOLDER)
    except OSError:
        return 0
    numbers = (name.removeprefix(_FILE) for name in names if name.startswith(_FILE))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def begin_term(run: Path, term: int) -> bool:
    """Begin a term; return False if another node has begun it."""
    make_folder(run / FOLDER, exist_ok=True)
    try:
        os.close(open_own(run / FOLDER / f"{_FILE}{term}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def refuse_if_over(run: Path, term: int | None) -> None:
    """Refuse to write after a later term has begun.

    Args:
        run: Run folder.
        term: Term in which the caller was started; None for a run on one host.

    Raises:
        CheckpointNotWritten: Another node leads the run now.
    """
    if term is not None and newest_term(run) > term:
        raise CheckpointNotWritten(
            f"another node leads {run.name} since nothing was seen of this one, so nothing is written here any more"
        )
