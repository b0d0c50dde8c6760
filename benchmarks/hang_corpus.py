"""Fractions of hangs with the right verdict, and of healthy twins left alone, over the corpus of `tests/faults/hangs`.

    python benchmarks/hang_corpus.py               all scripts and tasks, hanging and slow; about a quarter of an hour
    python benchmarks/hang_corpus.py --only ring   those whose name has that in it

Each of `tests/faults/broken` hangs or fails too. A case counts as right when its test passed: the verdict blames the
ranks that the script says, and each line is one that it marks. A twin is only slow: it must end well, and what is told
of it meanwhile must blame nobody but who is slow. Exits 1 if less than 95 % are right, or a twin was not left alone.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from faults import BROKEN
from paired import HERE, describe_surroundings, surroundings, write_results

CORPUS, SCRIPTS = "tests/faults/test_hang_corpus.py", "tests/faults/test_broken_scripts.py"
LEAST_RIGHT = 0.95


def main() -> None:
    """Run the corpus and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    record: dict[str, Any] = surroundings()
    with tempfile.TemporaryDirectory(prefix="dure-hangs-") as name:
        report = Path(name) / "report.xml"
        command = ["-m", "pytest", "-q", "-m", "faults or corpus", CORPUS, SCRIPTS, f"--junitxml={report}"]
        command += ["-k", f"({options.only})" if options.only else "corpus or broken", f"--basetemp={name}/runs"]
        subprocess.run([sys.executable, *command], cwd=HERE.parent, check=False)
        record["cases"] = cases_of(ElementTree.parse(report))
    hangs = {name: fault for name, fault in record["cases"].items() if not name.endswith("-slow")}
    twins = {name: fault for name, fault in record["cases"].items() if name.endswith("-slow")}
    record |= {"right_fraction": fraction(hangs), "left_alone_fraction": fraction(twins)}
    rows = [
        f"| {name.removesuffix('-hangs')} | {said(fault)} | {said(twins.get(twin_of(name)))} |"
        for name, fault in hangs.items()
    ]
    page = [
        "# Whether the verdict over a hang is right\n",
        f"{describe_surroundings(record)}\n",
        f"Right: {record['right_fraction']:.1%} of {len(hangs)}; twins left alone: "
        f"{record['left_alone_fraction']:.1%} of {len(twins)}.\n",
        "| what hangs | rank and line | its slow twin |\n|---|---|---|",
        *rows,
        "",
    ]
    write_results(options.results, "hang_corpus", record, "\n".join(page))
    if record["right_fraction"] < LEAST_RIGHT or record["left_alone_fraction"] < 1:
        wrong = [name for name, fault in record["cases"].items() if fault]
        raise SystemExit(f"hang_corpus: {', '.join(wrong)}")


def cases_of(report: "ElementTree.ElementTree[Any]") -> dict[str, str]:
    """Return what was wrong with each case, by its name; nothing if it was right."""
    return {
        case.get("name", "").partition("[")[2].removesuffix("]"): "; ".join(
            one.get("message", "") for kind in BROKEN for one in case.iter(kind)
        )
        for case in report.iter("testcase")
        if "[" in case.get("name", "")
    }


def twin_of(name: str) -> str:
    """Return the name of the case that is only slow."""
    return f"{name.removesuffix('-hangs')}-slow"


def said(fault: str | None) -> str:
    """Say in the table how a case went; None: there is none."""
    return "-" if fault is None else "wrong" if fault else "right"


def fraction(cases: dict[str, str]) -> float:
    """Return how many were right."""
    return sum(not fault for fault in cases.values()) / len(cases) if cases else 1.0


if __name__ == "__main__":
    main()
