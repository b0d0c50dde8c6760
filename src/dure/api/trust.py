"""Trust in a task's code that is named only by the record of a run."""

import importlib.machinery
import os
import sys
from pathlib import Path

from dure.errors import RunInvalid
from dure.records.run_dir import RunDir
from dure.terminal import shell_word


def check_trusted(reference: str, run: RunDir, verb: str, *, is_trusted: bool) -> None:
    """Refuse to import a task's file that only a run's record names, unless it is in the caller's current folder.

    The author of a run's folder chose the reference in its record, and importing that file runs it. Modules are found
    among this environment's own; code that came with the run's folder is never taken for the caller's.

    Args:
        reference: Reference in the record.
        run: Run with the record.
        verb: Command that would import it.
        is_trusted: Whether the caller trusts it.

    Raises:
        RunInvalid: The file is elsewhere, or came with the run's folder.
    """
    where = reference.rpartition(":")[0]
    here, files = Path.cwd().resolve(), _files_of(where)
    is_file = where.endswith(".py")
    came_along = any(file.is_relative_to(run.path.resolve()) for file in files)
    is_elsewhere = is_file and not all(file.is_relative_to(here) for file in files)
    if is_trusted or not (came_along or is_elsewhere):
        return
    lies = "came with the run's folder" if came_along else f"lies outside the current folder {here}"
    task, folder = shell_word(reference), shell_word(run.path)
    again = f"dure eval {folder} {task}" if verb == "eval" else f"dure train {task} --resume {folder}"
    raise RunInvalid(
        f"{run.path} names {reference} as its task, which {lies}, and would be run: if you know that code, name it "
        f"yourself (`{again}`) or add --trust-task"
    )


def _files_of(where: str) -> list[Path]:
    """Return the file, or the possible locations of a module; no code is run to find them."""
    if where.endswith(".py"):
        return [Path(where).resolve()]
    try:
        found = importlib.machinery.PathFinder.find_spec(where.partition(".")[0], [os.getcwd(), *sys.path])
    except (ImportError, ValueError):
        found = None
    if found is None:
        return []
    inner = Path(*where.split(".")[1:])
    places = list(found.submodule_search_locations or ()) or [found.origin or ""]
    return [(Path(place) / inner).resolve() for place in places]


def is_true(value: object) -> bool:
    """Return whether a setting is true, as a flag, a variable or a value."""
    return str(value).strip().lower() in ("true", "yes", "on", "1", "y", "t")
