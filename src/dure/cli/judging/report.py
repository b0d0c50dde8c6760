"""`dure report`: a run as one HTML page."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dure.cli.output import JsonFlag
from dure.terminal import one_line, print_json, print_text


def read(tokens: list[str]) -> tuple[list[str], Callable[..., None]]:
    """Return the tokens and the verb."""
    return tokens, report


def report(
    run: Annotated[Path, Parameter(help="the run's folder")],
    /,
    *,
    out: Annotated[Path | None, Parameter(help="the page to write; by default report.html in the run's folder")] = None,
    json: JsonFlag = False,
) -> None:
    """Write a run as one HTML page, which opens offline: findings, losses, times, lateness, events, settings."""
    from dure.doctor.findings import diagnose
    from dure.records.run_dir import RunDir
    from dure.report.page import check_library, write_page
    from dure.report.profiles import is_trace_due, merge_profiles

    check_library()
    opened = RunDir.open(run, or_script=True)
    if is_trace_due(opened):  # of a run that was killed before it wrote the trace
        merge_profiles(opened)
    path = opened.path / "report.html" if out is None else out
    found = diagnose(opened)
    write_page(opened, found.findings, path)
    if json:
        print_json({"file": str(path), "num_bytes": path.stat().st_size, "num_findings": len(found.findings)})
    else:
        print_text(one_line(path))
