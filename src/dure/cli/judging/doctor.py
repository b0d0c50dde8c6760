"""`dure doctor`: diagnosis of a run from the files that it left."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from dure.cli.output import JsonFlag
from dure.errors import FoundProblem
from dure.terminal import print_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dure.doctor.findings import Diagnosis

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold"}


def read(tokens: list[str]) -> tuple[list[str], Callable[..., None]]:
    """Return the tokens and the verb."""
    return tokens, doctor


def doctor(
    run: Annotated[Path, Parameter(help="the run's folder")],
    /,
    *,
    fail_on: Annotated[
        Literal["never", "warning", "error"], Parameter(help="end with 4 if something so grave is found")
    ] = "never",
    json: JsonFlag = False,
) -> None:
    """Explain a run: which rank failed or hung first, where, what makes it slow, and what to do."""
    from dure.doctor.findings import diagnose
    from dure.records.finding import SEVERITIES
    from dure.records.run_dir import RunDir

    found = diagnose(RunDir.open(run, or_script=True))
    if json:
        print_json(found.to_json())
    else:
        from dure.styled import draw

        for line in _lines(found):
            draw(line)
    if fail_on != "never" and found.worst is not None and SEVERITIES.index(found.worst) >= SEVERITIES.index(fail_on):
        raise FoundProblem(f"{found.run}: the gravest finding is of kind {found.worst} (--fail-on {fail_on})")


def _lines(found: "Diagnosis") -> Iterator["RenderableType"]:
    from dure.styled import Hanging, joined, styled

    yield joined((found.run, "bold"), f"  {found.status}")
    if not found.findings:
        yield styled("nothing is wrong with it, as far as its records tell")
    for finding in found.findings:
        first, *rest = finding.what.split("\n")
        yield ""
        yield Hanging(joined((finding.severity, _STYLES[finding.severity]), f"  {first}"))
        for line in rest:
            yield styled(line if line[:1].isspace() else f"  {line}", overflow="fold")
        for line in finding.evidence:
            yield Hanging(joined("  ", line))
        if finding.cause:
            yield Hanging(joined(("  cause: ", "bold"), finding.cause))
        if finding.remedy:
            yield Hanging(joined(("  remedy: ", "bold"), finding.remedy))
        if finding.gain_fraction is not None:
            yield joined(("  gain: ", "bold"), f"up to {finding.gain_fraction:.0%} of the time")
        if finding.files:
            yield styled(f"  see {', '.join(finding.files)}", "dim", overflow="fold")
