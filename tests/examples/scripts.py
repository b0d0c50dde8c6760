"""Runs an example that is a script, as a user does."""

from pathlib import Path

from tests.commands import Prewarmed

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE_SECONDS = 110.0
"""They train several times, and other tests run beside them; a test has 120 s."""


def run_example(prewarmed: Prewarmed, name: str, folder: Path, *arguments: str) -> str:
    """Return what a script prints; its runs go into `folder`."""
    # beside other tests threads would wait for each other, which costs OpenMP several times the work
    done = prewarmed.start(folder, *arguments, script=EXAMPLES / name, DURE_THREADS="1")
    assert done.wait(EXAMPLE_SECONDS) == 0, done.err
    return done.out
