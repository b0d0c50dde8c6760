"""Tests that take long, which are marked `slow` by a list that is made of recorded durations.

`python -m tests.long_tests CI_OUTPUT` makes the list anew from the output of `pytest --record-durations`. A test is in
it because it starts several processes or runs; `@pytest.mark.slow` at a test is for those of which that is known.
"""

import functools
import json
import sys
from collections.abc import Iterable
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")
LONG_SECONDS = 2.0
"""Seconds, beside three other processes on two cores, from which a test is long."""
ALWAYS = (
    "tests/house/",
    "tests/conformance/zoo/",
    "tests/conformance/test_resume.py::test_resume_in_the_same_place",
    "tests/conformance/test_weights.py::test_weights_of_every_strategy",
    "tests/faults/test_kill_and_resume.py",
    "tests/launch/scripts/test_script.py::test_script_when_run_on_two_ranks",
    "tests/report/test_page.py",
)
"""Beginnings of the names of tests that every run of the suite includes, whatever they take."""


@functools.cache
def listed() -> frozenset[str]:
    """Return the names of the long tests."""
    return frozenset(LIST.read_text().splitlines())


def long_tests(output: Iterable[str]) -> list[str]:
    """Return the names of the long tests by an output of pytest; those listed stay, because CI left them out."""
    durations: dict[str, float] = {}
    for line in output:
        if line.startswith("durations: "):
            durations |= json.loads(line.removeprefix("durations: "))["tests"]
    found = {name for name, seconds in durations.items() if seconds >= LONG_SECONDS and not name.startswith(ALWAYS)}
    return sorted(found | listed())


if __name__ == "__main__":
    with open(sys.argv[1], errors="replace") as file:
        names = long_tests(file)
    LIST.write_text("\n".join(names) + "\n")
