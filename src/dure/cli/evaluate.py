"""`dure eval`: evaluation of a run's checkpoint on the task's evaluation data."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from dure.cli.options.settings import flag_parameters, spell_out_truths, with_flags
from dure.cli.output import JsonFlag
from dure.spec import EVALUATION_FIELDS
from dure.terminal import print_json


def read(tokens: list[str]) -> tuple[list[str], Callable[..., None]]:
    """Return the tokens, with boolean flags in one form, and the verb."""
    return spell_out_truths(tokens), with_flags(evaluate, flag_parameters(EVALUATION_FIELDS))


def evaluate(
    run: Annotated[Path, Parameter(help="the run's folder")],
    task: Annotated[str | None, Parameter(help="its task, file.py:Class, if that lies outside this folder")] = None,
    /,
    *,
    which: Annotated[Literal["best", "last"], Parameter(help="which checkpoint")] = "best",
    json: JsonFlag = False,
    **settings: Any,
) -> None:
    """Measure a run's best checkpoint on the evaluation data, every sample once.

    The result is the same on any number of ranks.
    """
    from dure.api import train as api

    given = {name: value for name, value in {"task": task, **settings}.items() if value is not None}
    result = api.evaluate(run, which=which, **given)
    if json:
        print_json(result)
        return
    from dure.records.step_record import Metric
    from dure.report.tables import metrics_table
    from dure.styled import draw, styled

    draw(styled(f"{which} checkpoint {result['checkpoint']}"))
    draw(metrics_table({name: Metric(**metric) for name, metric in result["metrics"].items()}))
