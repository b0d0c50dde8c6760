"""`dure export-records`: a run's records as a table for other programs."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from dure.cli.output import JsonFlag
from dure.errors import Misuse, RunInvalid
from dure.terminal import few, one_line, print_json, print_status, print_text, shell_word

if TYPE_CHECKING:
    from dure.records.run_dir import RunDir


def read(tokens: list[str]) -> tuple[list[str], Callable[..., None]]:
    """Return the tokens and the verb."""
    return tokens, export_records


def export_records(
    run: Annotated[Path, Parameter(help="the run's folder")],
    file: Annotated[Path, Parameter(help="what to write: a table (.csv, .parquet) or a timeline (.json)")],
    /,
    *,
    table: Annotated[Literal["steps", "evaluations"], Parameter(help="a row for each step and rank, or evaluation")] = (
        "steps"
    ),
    steps: Annotated[int, Parameter(help="steps of a timeline, the last ones of the run")] = 100,
    json: JsonFlag = False,
) -> None:
    """Write a run's records as a table (CSV, Parquet), or its last steps as a timeline for Perfetto (JSON)."""
    from dure.records.run_dir import RunDir
    from dure.report.record_tables import TRACE, check_file, read_table, write_table

    check_file(file)
    if steps < 1:
        raise Misuse(f"--steps is {steps} but must be at least 1")
    opened = RunDir.open(run, or_script=True)
    if opened.is_script and (table != "steps" or not opened.recorded_ranks()):
        raise RunInvalid(
            f"{run} is the run of a script (`dure run`), which has no records of evaluations, and of steps only with "
            "--record"
        )
    if file.suffix == TRACE:
        _write_timeline(opened, file, steps, json=json)
        return
    found = read_table(opened, table)
    write_table(found, file)
    if not found.num_rows:
        print_status(f"{one_line(run)} has no {table} on record: see `dure doctor {shell_word(run)}`")
    elif found.missing:
        ranks = few(found.missing)
        print_status(f"the records of rank{'s' * (len(found.missing) > 1)} {ranks} are missing, and have no rows")
    if json:
        print_json(
            {
                "file": str(file),
                "num_rows": found.num_rows,
                "columns": [*found.columns],
                "num_left_out": found.num_left_out,
                "missing_ranks": found.missing,
            }
        )
        return
    rows = f"{found.num_rows:,} row{'' if found.num_rows == 1 else 's'} of {len(found.columns)} columns"
    left_out = f"; damaged lines left out: {found.num_left_out:,}" if found.num_left_out else ""
    print_text(one_line(f"{file}: {rows}{left_out}"))


def _write_timeline(run: "RunDir", file: Path, steps: int, *, json: bool) -> None:
    from dure.report.trace import write_trace

    num_steps = write_trace(run, file, steps)
    if json:
        print_json({"file": str(file), "num_steps": num_steps})
    else:
        print_text(one_line(f"{file}: {num_steps:,} step{'' if num_steps == 1 else 's'}; open it in ui.perfetto.dev"))
