"""Apex's old launcher: `python -m dure.compat.apex.parallel.multiproc [--world-size N] script.py arguments`.

It is `dure run --as apex`, and the script is given `--world-size N --rank R` after its own arguments.
"""

import os
import sys
from collections.abc import Sequence

_SIZE = "--world-size"


def command_of(arguments: Sequence[str]) -> list[str]:
    """Return the command of `dure run` for the arguments of the launcher.

    A `--world-size` of the script itself, anywhere in its arguments, gives the number of ranks, as in Apex; by default
    there is one for each accelerator.

    Raises:
        SystemExit: No script is given, or no number after `--world-size`.
    """
    given = list(arguments)
    count = "auto"
    if _SIZE in given:
        place = given.index(_SIZE)
        count = given[place + 1] if place + 1 < len(given) else ""
        if not count.isdecimal():
            raise SystemExit(f"{_SIZE} needs the number of ranks after it, as in {_SIZE} 2")
        del given[place : place + 2]
    if not given:
        raise SystemExit("no script is given: write `python -m dure.compat.apex.parallel.multiproc script.py`")
    return [
        sys.executable,
        "-m",
        "dure",
        "run",
        "--as",
        "apex",
        "--local-rank-argument",
        "apex",
        "--nproc",
        count,
        *given,
    ]


if __name__ == "__main__":
    command = command_of(sys.argv[1:])
    os.execv(command[0], command)  # noqa: S606
