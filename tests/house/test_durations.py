"""The record of durations that CI writes."""

import json
from types import SimpleNamespace
from typing import Any, cast

from tests.durations import Durations


def test_durations_when_phases_are_reported_then_sums_are_written_by_test_and_file() -> None:
    durations, lines = Durations(), list[str]()
    for name, seconds in (("a.py::one", 0.3), ("a.py::one", 0.4), ("a.py::two", 0.1), ("b.py::one", 0.001)):
        durations.pytest_runtest_logreport(cast(Any, SimpleNamespace(nodeid=name, duration=seconds)))
    durations.pytest_terminal_summary(cast(Any, SimpleNamespace(write_line=lines.append)))
    record = json.loads(lines[0].removeprefix("durations: "))
    assert record == {"least_seconds": 0.5, "files": {"a.py": 0.8}, "tests": {"a.py::one": 0.7}}
