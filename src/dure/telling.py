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
        print(printable(f"dure: {text}"), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Return a text of several lines with every other control character written out.

    An exception's message is the user's, or comes from a file or a network: it must not clear the terminal that it is
    told on, or move the cursor.
    """
    return "".join(char if char.isprintable() or char in "\n\t" else _written_out(char) for char in text)


def _written_out(char: str) -> str:
    return f"\\x{ord(char):02x}" if ord(char) < 0x100 else f"\\u{ord(char):04x}"
