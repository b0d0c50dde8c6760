"""`dure runs`: the runs of a folder."""

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dure.cli.output import JsonFlag
from dure.records.run_list import list_runs
from dure.spec import RunSpec
from dure.terminal import one_line, print_json, print_status


def read(tokens: list[str]) -> tuple[list[str], Callable[..., None]]:
    """Return the tokens and the verb."""
    return tokens, runs


def runs(
    *,
    runs_dir: Annotated[
        Path | None, Parameter(help="folder of the runs", show_default=lambda _: str(default_folder()))
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Show the runs of a folder: status, strategy and devices, samples, best metric."""
    folder = runs_dir or default_folder()
    # before the first run there is no ./runs, which is not an error; a folder that was named must exist
    found = list_runs(folder) if runs_dir is not None or folder.exists() else []
    if json:
        print_json({"runs": [asdict(run) for run in found]})
        return
    from dure.report.tables import runs_table
    from dure.styled import draw

    if found:
        draw(runs_table(found))
    else:
        print_status(f"no runs in {one_line(folder)}: `dure train` starts one")


def default_folder() -> Path:
    """Return the folder of the runs of a command that was given none."""
    return Path(os.environ.get("DURE_RUNS_DIR") or RunSpec.model_fields["runs_dir"].default)
