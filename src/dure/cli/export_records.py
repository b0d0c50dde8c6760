"""`dure export-records`: a run's records as a table for other programs."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from dure.cli.output import JsonFlag
from dure.errors import RunInvalid
from dure.terminal import few, one_line, print_json, print_status, print_text, shell_word


def read(tokens: list[str]) -> tuple[list[str], Callable[..., None]]:
    """Return the tokens and the verb."""
    return tokens, export_records


def export_records(
    run: Annotated[Path, Parameter(help="the run's folder")],
    file: Annotated[Path, Parameter(help="what to write: .csv or .parquet")],
    /,
    *,
    table: Annotated[Literal["steps", "evaluations"], Parameter(help="a row for each step and rank, or evaluation")] = (
        "steps"
    ),
    json: JsonFlag = False,
) -> None:
    """Write a run's step records or evaluations into one CSV or Parquet file."""
    from dure.records.run_dir import RunDir
    from dure.report.record_tables import check_file, read_table, write_table

    check_file(file)
    opened = RunDir.open(run, or_script=True)
    if opened.is_script:
        raise RunInvalid(f"{run} is the run of a script (`dure run`), which has no records of steps and evaluations")
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
