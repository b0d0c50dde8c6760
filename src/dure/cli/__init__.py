"""Command line: one thin file per verb, results on stdout, messages on stderr."""

from dure.cli.app import main

__all__ = ["main"]
