"""What dure says of a run while it goes on: on stderr, so that stdout has results only."""

import os
import sys
from contextlib import suppress
from typing import TextIO


def has_live_line(stream: TextIO) -> bool:
    """Tell whether its last line can be written over: it is a terminal, and not a dumb one."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def tell(text: str) -> None:
    """Say it, if anybody still reads."""
    with suppress(OSError):
        print(f"dure: {text}", file=sys.stderr, flush=True)
