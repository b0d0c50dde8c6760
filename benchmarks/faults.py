"""Rate at which the promises of a disturbed run are kept: the table of `tests/faults`, again and again.

    python benchmarks/faults.py                  each row twenty times, each time at other moments
    python benchmarks/faults.py --repeat 2       to try it out

Races hide: what fails in four of ten runs looks right in one. A row counts as kept when its test passed: samples,
steps, weights and last loss are those of its control, and the pause is within what is promised. Exits 1 if any was not.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from paired import HERE, describe_surroundings, surroundings, write_results

TABLE = "tests/faults/test_table.py"
BROKEN = ("failure", "error", "skipped")
"""Elements of a test in pytest's report that mean that it did not pass."""


def main() -> None:
    """Run the table and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    record: dict[str, Any] = surroundings()
    with tempfile.TemporaryDirectory(prefix="dure-faults-") as name:
        report = Path(name) / "report.xml"
        command = ["-m", "pytest", "-q", "-m", "faults", TABLE, "--count", str(options.repeat), f"--junitxml={report}"]
        command += ["-o", "junit_family=xunit1"]  # the other one has no place for seconds
        subprocess.run([sys.executable, *command, f"--basetemp={name}/runs"], cwd=HERE.parent, check=False)
        record["rows"] = rows_of(ElementTree.parse(report))
    lines = [
        f"| {what} | {row['kept']} of {row['times']} | {row['within_seconds']:g} | {row['median_seconds']:.2f} | "
        f"{row['longest_seconds']:.2f} |"
        for what, row in record["rows"].items()
    ]
    page = [
        f"# What happens to a run, {options.repeat} times each\n",
        f"{describe_surroundings(record)}\n",
        "Seconds are from the last step before to the first step after; for what ends the run, to its end.\n",
        "| what happens | as promised | bound, s | median, s | longest, s |\n|---|---|---|---|---|",
        *lines,
        "",
    ]
    write_results(options.results, "faults", record, "\n".join(page))
    broken = [f"{what}: {text}" for what, row in record["rows"].items() for text in row["failures"]]
    if broken:
        raise SystemExit("faults: " + "; ".join(broken))


def rows_of(report: "ElementTree.ElementTree[Any]") -> dict[str, dict[str, Any]]:
    """Return what came of each row, by its name."""
    cases = defaultdict(list)
    for case in report.iter("testcase"):
        # `test[what-3-20]`: the third of twenty
        what = case.get("name", "").partition("[")[2].rpartition("]")[0].rsplit("-", 2)[0]
        cases[what].append(case)
    return {what: row_of(found) for what, found in cases.items()}


def row_of(cases: list[Any]) -> dict[str, Any]:
    """Return how often one row was kept, and its seconds."""
    told: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        for one in case.iter("property"):
            told[one.get("name")].append(float(one.get("value")))
    failures = [[one.get("message", "") for kind in BROKEN for one in case.iter(kind)] for case in cases]
    seconds = told["seconds"] or [float("nan")]
    return {
        "times": len(cases),
        "kept": failures.count([]),
        "within_seconds": max(told["within_seconds"], default=float("nan")),
        "median_seconds": statistics.median(seconds),
        "longest_seconds": max(seconds),
        "failures": [text for texts in failures for text in texts],
    }


if __name__ == "__main__":
    main()
