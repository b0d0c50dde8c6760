"""Where a command's result goes: stdout, as text for people or as one JSON document."""

import json
import os
import sys
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console, RenderableType

from dure.errors import DureError
from dure.rank import RankInfo

JsonFlag = Annotated[
    bool, Parameter(name="--json", negative=(), show_default=False, help="print one JSON object and nothing else")
]

PIPE_COLUMNS = 160
"""Width where stdout is no terminal: wide enough that no run name is broken, so that `grep` finds it."""


def speaks_for_all() -> bool:
    """Whether this process is the one that says what all ranks have in common; under a launcher only rank 0 is."""
    try:
        place = RankInfo.from_environment()
    except DureError:
        return True  # nobody knows which rank this is, and that has to be said
    return place is None or place.rank == 0


def print_json(document: Any) -> None:
    """Print one JSON document. Not-a-number and infinity, which JSON lacks, become null."""
    print(json.dumps(_finite(document), indent=2, default=str))


def show(result: RenderableType) -> None:
    """Print a result for people, as wide as the terminal; plain where there is none or `NO_COLOR` is set."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_COLUMNS
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(result)
    # tables pad their last column to its width; trailing spaces only make narrow terminals wrap
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
