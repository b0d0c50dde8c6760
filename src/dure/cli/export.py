"""`dure export`: a run's weights as one safetensors file."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from dure.cli.output import JsonFlag
from dure.terminal import one_line, print_json, print_status, print_text
from dure.units import format_bytes


def read(tokens: list[str]) -> tuple[list[str], Callable[..., None]]:
    """Return the tokens and the verb."""
    return tokens, export


def export(
    run: Annotated[Path, Parameter(help="the run's folder")],
    file: Annotated[Path, Parameter(help="what to write, such as model.safetensors")],
    /,
    *,
    which: Annotated[Literal["last", "best"], Parameter(help="which checkpoint")] = "last",
    json: JsonFlag = False,
) -> None:
    """Write a run's weights, under the model's own names, into one safetensors file."""
    from dure.api import train as api

    result = api.export(run, file, which=which)
    if json:
        print_json(result)
    else:
        for warning in result["warnings"]:
            print_status(warning)
        size = result.get("num_bytes")
        description = f"{which} checkpoint {result['checkpoint']}"
        print_text(
            one_line(f"{file}: {description}") + (f", {format_bytes(size)}" if isinstance(size, int | float) else "")
        )
