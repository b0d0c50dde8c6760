"""The command line: one thin file per verb, results on stdout, talk on stderr."""

from dure.cli.app import main

__all__ = ["main"]
