"""The record of durations that CI writes."""

import json
from types import SimpleNamespace
from typing import Any, cast

from tests.durations import Durations
from tests.house.rooms import ROOT
from tests.long_tests import ALWAYS, LIST, listed, long_tests


def test_durations_when_phases_are_reported_then_sums_are_written_by_test_and_file() -> None:
    durations, lines = Durations(), list[str]()
    for name, seconds in (("a.py::one", 0.3), ("a.py::one", 0.4), ("a.py::two", 0.1), ("b.py::one", 0.001)):
        durations.pytest_runtest_logreport(cast(Any, SimpleNamespace(nodeid=name, duration=seconds)))
    durations.pytest_terminal_summary(cast(Any, SimpleNamespace(write_line=lines.append)))
    record = json.loads(lines[0].removeprefix("durations: "))
    assert record == {"least_seconds": 0.5, "files": {"a.py": 0.8}, "tests": {"a.py::one": 0.7}}


def test_long_tests_when_listed_then_they_exist() -> None:
    gone = [
        name
        for name in listed()
        if f"def {name.partition('::')[2].partition('[')[0]}(" not in (ROOT / name.partition("::")[0]).read_text()
    ]
    assert not gone, f"take these out of {LIST}"


def test_long_tests_when_durations_are_read_then_long_ones_are_added_and_those_of_every_run_left_out() -> None:
    tests = {"tests/a.py::test_x": 2.0, "tests/a.py::test_y": 1.9, f"{ALWAYS[0]}test_x.py::test_z": 9.0}
    found = long_tests(["noise", f"durations: {json.dumps({'tests': tests})}"])
    assert {*found} - listed() == {"tests/a.py::test_x"}
