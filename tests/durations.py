"""Durations of tests as JSON at the end of pytest's output (`--record-durations`), for finding where the time goes."""

import json
from collections import defaultdict

import pytest

LEAST_SECONDS = 0.5


class Durations:
    """Seconds of each test, its fixtures included; with pytest-xdist those of all workers."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        self._seconds[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Write one line: totals by file, and the tests that take long."""
        files: defaultdict[str, float] = defaultdict(float)
        for name, seconds in self._seconds.items():
            files[name.partition("::")[0]] += seconds
        slowest = {name: seconds for name, seconds in self._seconds.items() if seconds >= LEAST_SECONDS}
        record = {"least_seconds": LEAST_SECONDS, "files": _sorted(files), "tests": _sorted(slowest)}
        terminalreporter.write_line(f"durations: {json.dumps(record)}")


def _sorted(seconds: dict[str, float]) -> dict[str, float]:
    longest_first = sorted(seconds.items(), key=lambda one: -one[1])
    return {name: round(value, 2) for name, value in longest_first if value >= 0.01}
