"""Environment variables of this process that are set for a while."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""Name of the loopback interface."""


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables in a context, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def on_loopback(*names: str) -> AbstractContextManager[None]:
    """Return a context in which variables select the loopback interface, except those that the user has set."""
    return variables({name: LOOPBACK for name in names if name not in os.environ})
