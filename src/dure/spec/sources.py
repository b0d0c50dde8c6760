"""Sources of settings: the call's flags, the environment, a TOML file, and a task's defaults."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dure import documents
from dure.documents import DocumentInvalid, parse_json
from dure.errors import SpecInvalid
from dure.spec import old_names
from dure.spec.fields import OTHER_NAMES, PLACE_FIELDS, SETTINGS, flag_name
from dure.spec.names import unknown_setting
from dure.spec.old_names import STRATEGIES_WITH
from dure.spec.strategy_traits import StrategyTraits, option_names

ENVIRONMENT_PREFIX = "DURE_"

INTERNAL_PREFIX = "DURE_INTERNAL_"
"""Prefix of variables that dure's own processes pass to each other; never settings, so never reported as unknown ones.
"""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Source of settings."""

    values: Mapping[str, Any]
    origin_of: Callable[[str], str]
    """Function that returns the origin of one setting as text."""
    spell: Callable[[str], str] = str
    """Function that spells a setting's name as in this source."""
    more: tuple[str, ...] = ()
    """Names other than settings that its faults may suggest."""
    is_for_one_strategy: bool = False
    """True if settings of strategies other than the chosen one are a fault; other sources may have settings of several
    strategies.
    """
    is_chosen: bool = True
    """False for defaults and the resumed run: their values are dropped instead of being a fault."""


def flag_source(settings: Mapping[str, Any]) -> Source:
    """Return the source for the call: flags, or arguments in Python."""
    return Source(values=settings, origin_of=_flag_origin, spell=flag_name, more=("resume",), is_for_one_strategy=True)


def _flag_origin(name: str) -> str:
    if name == "task":
        return "argument task"
    option = name.removeprefix("task_options.")
    return f"flag {flag_name(name)}" if option == name else f"flag --task.{option}"


def task_source(defaults: Mapping[str, Any], higher: list[Mapping[str, Any]]) -> Source:
    """Return the source for the defaults of a task.

    Args:
        defaults: `Task.defaults`.
        higher: Values of the other sources, one of which names the task.
    """
    task = next((str(values["task"]) for values in higher if "task" in values), "task")
    label = f"{task.rpartition(':')[2]}.defaults"
    return Source(values=defaults, origin_of=lambda name: label, is_chosen=False)


def without_place(source: Source) -> Source:
    """Return a source without the run's location: a shell's DURE_RUNS_DIR is for new runs, a resumed one stays."""
    values = {name: value for name, value in source.values.items() if name not in PLACE_FIELDS}
    return replace(source, values=values)


def environment_source(
    environ: Mapping[str, str], strategies: Mapping[str, StrategyTraits], faults: list[str]
) -> Source:
    """Read `DURE_<FIELD>` and `DURE_<STRATEGY>__<OPTION>`; an empty variable counts as not set, as in the shell."""
    known = {_variable(name): name for name in (*SETTINGS, *OTHER_NAMES, *STRATEGIES_WITH, *old_names.SETTINGS)}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable.startswith(INTERNAL_PREFIX) or not text.strip():
            continue
        table, is_option, option = variable.removeprefix(ENVIRONMENT_PREFIX).lower().partition("__")
        if variable not in known and is_option and table in strategies:
            values.setdefault(table, {})[option] = text
        elif variable not in known:
            names = [*SETTINGS, *option_names(strategies)]
            faults.append(unknown_setting("environment variable", variable, names, _variable))
        elif known[variable] == "task_options":
            values["task_options"] = _options_from_json(variable, text, faults)
        else:
            values[known[variable]] = text
    return Source(values=values, origin_of=_variable_origin, spell=_variable)


def _variable_origin(name: str) -> str:
    return f"environment {_variable('task_options' if name.startswith('task_options.') else name)}"


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.replace(".", "__").upper()


def _options_from_json(variable: str, text: str, faults: list[str]) -> dict[str, Any]:
    try:
        options = parse_json(text)
    except ValueError:
        options = None
    if isinstance(options, dict):
        return options
    faults.append(f'environment {variable} is {text!r} but must be a JSON object such as {{"hidden": 64}}')
    return {}


def config_source(config: Path | None, faults: list[str]) -> Source:
    """Return the source for the settings of a TOML file."""
    if config is None:
        return Source(values={}, origin_of=str)
    values: dict[str, Any] = {}
    try:
        values = read_toml(config)
    except SpecInvalid as error:
        faults += error.faults
    return Source(values=values, origin_of=lambda name: str(config))


def read_toml(config: Path) -> dict[str, Any]:
    """Return the contents of a file of settings.

    Raises:
        SpecInvalid: It cannot be read, or is not TOML.
    """
    try:
        return documents.read_toml(Path(config))
    except DocumentInvalid as error:
        raise SpecInvalid([f"{config} {error}"]) from None
    except OSError as error:
        raise SpecInvalid([f"--config {config} cannot be read: {error.strerror}"]) from None
