"""The command line: one thin file per verb, results on stdout, talk on stderr."""

import gc

# nothing that is imported here is given back: looking through it for cycles costs a sixth of the time of `--help`
_was_enabled = gc.isenabled()
gc.disable()

from dure.cli.app import main  # noqa: E402

if _was_enabled:
    gc.enable()

__all__ = ["main"]
