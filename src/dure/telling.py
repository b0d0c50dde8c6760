"""What dure says of a run while it goes on: on stderr, so that stdout has results only."""

import sys
from contextlib import suppress


def tell(text: str) -> None:
    """Say it, if anybody still reads."""
    with suppress(OSError):
        print(f"dure: {text}", file=sys.stderr, flush=True)
