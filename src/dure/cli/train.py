"""`dure train`: start or resume of a run."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from dure.cli.options.settings import (
    Shown,
    flag_parameters,
    option_parameters,
    setting_names,
    spell_out_truths,
    with_flags,
)
from dure.cli.options.task import is_reference, take_task_options, task_parameters
from dure.cli.output import JsonFlag, is_reporter
from dure.errors import RunInvalid
from dure.records.run_dir import RunDir
from dure.spec import flag_name
from dure.terminal import print_json, shell_word

if TYPE_CHECKING:
    from dure.training.task.task import Task

_HELP = frozenset({"--help", "-h"})
_HELP_ALL = "--help-all"
_MORE = (
    "dure train --strategy NAME --help shows that strategy's own options, FILE:Task --help the task's, --help-all "
    "every flag. In a TOML file a strategy's options are a table, as [fsdp]."
)


def read(tokens: list[str]) -> tuple[list[str], Callable[..., None]]:
    """Take the task's own options, which only the task knows, out of the tokens, and build the verb with them.

    `--no-pretrained` is short for `--task.pretrained false` if the task has such an option and dure has none. Only this
    short form and `--help` require the task's class, and so import torch, before the settings are checked.

    Returns:
        The remaining tokens, and the verb.
    """
    shown = Shown.wanted(tokens, everything=_HELP_ALL in tokens)
    flags = flag_parameters(setting_names(), shown)
    strategies = option_parameters(tokens, shown)
    tokens = ["--help" if token == _HELP_ALL else token for token in tokens]
    rest, options = take_task_options(spell_out_truths(tokens, strategies))
    for token in [token for token in rest if _is_foreign_negative(token)]:
        name = token.removeprefix("--no-").replace("-", "_")
        if name in _option_names(_task_class(rest)):
            rest.remove(token)
            options[name] = "false"
    cls = _task_class(rest) if _HELP.intersection(rest) else None
    own = task_parameters(cls) if cls is not None else []
    return rest, with_flags(partial(train, options), [*own, *flags, *strategies], doc=train.__doc__, more=_MORE)


def _is_foreign_negative(token: str) -> bool:
    known = {flag_name(name) for name in setting_names()}
    return token.startswith("--no-") and "--" + token.removeprefix("--no-") not in known


def _task_class(tokens: Sequence[str]) -> "type[Task] | None":
    """Load the class that the tokens name; return None if they name none."""
    references = [token for token in tokens if is_reference(token)]
    if not references:
        return None
    from dure.training.task.load_task import load_task_class

    return load_task_class(references[0])


def _option_names(cls: "type[Task] | None") -> set[str]:
    if cls is None:
        return set()
    from dure.training.task.options import task_options

    return set(task_options(cls))


def train(
    options: dict[str, str],
    task: Annotated[
        str | None, Parameter(help="file.py:Class or package.module:Class; not needed with --resume")
    ] = None,
    /,
    *,
    resume: Annotated[
        Path | None,
        Parameter(help="resume the run of this folder, under any strategy and nproc; auto: that of --name, if any"),
    ] = None,
    config: Annotated[Path | None, Parameter(help="TOML file of settings; flags and DURE_* override it")] = None,
    show_spec: Annotated[
        bool, Parameter(negative=(), show_default=False, help="print every setting and its source; do not train")
    ] = False,
    json: JsonFlag = False,
    **settings: Any,
) -> None:
    """Train a task, or resume a run.

    Flags override DURE_<NAME> in the environment, which overrides the TOML file, which overrides the task's defaults.
    """
    from dure.api import train as api

    settings = {name: value for name, value in settings.items() if value is not None}
    if options:
        settings["task_options"] = options
    if show_spec:
        from dure.api.settings import print_notes
        from dure.cli.show_spec import print_spec

        resolved = api.resolve_settings(task, resume=resume, config=config, **settings)
        print_notes(resolved)
        print_spec(resolved, as_json=json)
        return
    summary = api.train(task, resume=resume, config=config, **settings)
    if not is_reporter():
        return
    if json:
        print_json(summary.to_json())
    elif not _is_quiet(settings, Path(summary.run)):
        from dure.doctor.slowness import slowest_of
        from dure.report.tables import render
        from dure.styled import Hanging, draw, joined

        draw(render(summary))
        if (slowest := slowest_of(Path(summary.run))) is not None:
            draw("")
            draw(Hanging(joined(("slow: ", "bold"), f"{slowest}; see `dure doctor {shell_word(summary.run)}`")))


def _is_quiet(settings: Mapping[str, Any], run: Path) -> bool:
    """Return whether `quiet` is set, also by the environment or the TOML file, as recorded in the run's spec."""
    if "quiet" in settings:
        return bool(settings["quiet"])
    try:
        return RunDir.open(run).read_spec().quiet
    except RunInvalid:
        return False
