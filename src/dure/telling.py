"""What dure says of a run while it goes on: on stderr, so that stdout has results only."""

import os
import sys
from contextlib import suppress
from typing import TextIO


def has_live_line(stream: TextIO) -> bool:
    """Return whether its last line can be written over: it is a terminal, no dumb one, or a notebook's cell."""
    return (stream.isatty() and os.environ.get("TERM") != "dumb") or is_notebook(stream)


def is_notebook(stream: TextIO) -> bool:
    """Return whether a stream shows in a notebook, which knows a carriage return but erases nothing."""
    return any(cls.__module__ == "ipykernel.iostream" for cls in type(stream).__mro__)


def own_descriptor(stream: TextIO | None) -> int | None:
    """Return the descriptor of standard error, None if Python's stream leads elsewhere: to a notebook, or a buffer."""
    if stream is None:
        return 2
    try:
        return 2 if stream.fileno() == 2 else None
    except (OSError, ValueError):
        return None


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
