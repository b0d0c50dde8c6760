"""Flags derived from the fields of `RunSpec` and the options of strategies, so that a new one needs no line here."""

import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from cyclopts import Group, Parameter, Token
from cyclopts.help import ColumnSpec, DefaultFormatter, DescriptionRenderer, NameRenderer
from pydantic.fields import FieldInfo

from dure.spec import ENVIRONMENT_PREFIX, GROUPS, OTHER_NAMES, SETTINGS, TABLES, field_of, flag_name, is_everyday, kinds
from dure.spec.old_names import SETTINGS as OLD_SETTINGS
from dure.spec.old_names import STRATEGIES_WITH, TRUTHS
from dure.strategies.table import STRATEGIES

_TRUTH_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0"})
_NOT_FLAGS = frozenset({"task", "task_options"})
_OPTION = re.compile(r"--(?:no-)?(?P<strategy>[A-Za-z][\w-]*)\.[^=]+")
_BETWEEN = "__"
"""Separator between a table, or a strategy, and its field in a parameter's name."""


def setting_names() -> tuple[str, ...]:
    """Return the settings that are flags: all except the task and its options."""
    return tuple(name for name in SETTINGS if name not in _NOT_FLAGS)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """Flags that `--help` shows; all others are accepted as well."""

    everything: bool = True
    strategy: str | None = None
    """Strategy whose options are shown too; None for none."""

    @classmethod
    def wanted(cls, tokens: Sequence[str], *, everything: bool) -> "Shown":
        """Return the flags to show for some tokens: those of most runs, and the options of a strategy they name."""
        return cls(everything=everything, strategy=_chosen_strategy(tokens))


def flag_parameters(names: Iterable[str], shown: Shown | None = None) -> list[inspect.Parameter]:
    """Return one keyword parameter per setting, in groups as in `--help`.

    The user's values are passed on as text. `resolve` checks them together with all other sources, so that every fault
    is reported at once. Omitted values are None.
    """
    wanted, shown = set(names), shown or Shown()
    parameters = []
    for title, fields in GROUPS.items():
        group = Group.create_ordered(title)
        parameters += [
            _flag_parameter(
                name.replace(".", _BETWEEN),
                flag_names(name),
                field_of(name),
                group,
                is_shown=shown.everything or is_everyday(field_of(name)),
            )
            for name in fields
            if name in wanted
        ]
    return parameters


def option_parameters(tokens: Sequence[str], shown: Shown) -> list[inspect.Parameter]:
    """Return parameters for the options of the strategies that the tokens name, or that are shown."""
    named = {match["strategy"].replace("-", "_") for match in map(_OPTION.match, tokens) if match}
    wanted = [*STRATEGIES] if shown.everything else [*named, *([shown.strategy] if shown.strategy else [])]
    parameters = []
    for strategy in dict.fromkeys(wanted):
        if strategy in TABLES or strategy not in STRATEGIES:
            continue
        title = f"Options of strategy {strategy}"
        group = Group.create_ordered(title, help_formatter=DefaultFormatter(column_specs=_wide_names))
        parameters += [
            _flag_parameter(
                f"{strategy}{_BETWEEN}{option}",
                (flag_name(f"{strategy}.{option}"),),
                info,
                group,
                is_shown=shown.everything or strategy == shown.strategy,
            )
            for option, info in STRATEGIES[strategy].option_class().model_fields.items()
        ]
    given = {token.partition("=")[0].replace("--no-", "--", 1) for token in tokens}
    group = Group.create_ordered("Old names")
    parameters += [
        _flag_parameter(old, (flag_name(old),), _OLD_TRUTH if old in TRUTHS else _OLD_TEXT, group, is_shown=False)
        for old in (*STRATEGIES_WITH, *OLD_SETTINGS)
        if flag_name(old) in given
    ]
    return parameters


def _wide_names(console: Any, options: Any, entries: Any) -> tuple[ColumnSpec, ...]:
    """Give names half of the width: a strategy's name before its option does not fit into a third of it."""
    half = console.width // 2
    names = ColumnSpec(renderer=NameRenderer(max_width=half), style="cyclopts.name", max_width=half)
    return names, ColumnSpec(renderer=DescriptionRenderer(), overflow="fold")


_OLD_TRUTH, _OLD_TEXT = FieldInfo(annotation=bool, default=None), FieldInfo(annotation=str, default=None)


def _chosen_strategy(tokens: Sequence[str]) -> str | None:
    """Return the strategy named by the tokens, or else by the environment, if it exists."""
    named = [os.environ.get(f"{ENVIRONMENT_PREFIX}STRATEGY", "")]
    for position, token in enumerate(tokens):
        flag, is_one, value = token.partition("=")
        if flag == "--strategy":
            named.append(value if is_one else "".join(tokens[position + 1 : position + 2]))
    return named[-1] if named[-1] in STRATEGIES else None


def flag_names(name: str) -> tuple[str, ...]:
    """Return a setting's flag and its other names."""
    return (flag_name(name), *(flag_name(other) for other, own in OTHER_NAMES.items() if own == name))


def _flag_parameter(
    name: str, flags: tuple[str, ...], info: FieldInfo, group: Group, *, is_shown: bool
) -> inspect.Parameter:
    (kind,) = kinds(info)
    words = info.description or ""
    if get_origin(kind) is Literal:
        words = f"{words} [choices: {', '.join(get_args(kind))}]"
    if kind is not bool:
        # by itself the parser would refuse a wrong word or number before the other settings are checked; `--help` shows
        # the name
        kind = str if get_origin(kind) is Literal else type(kind.__name__, (str,), {})
    default = info.default
    parameter = Parameter(
        name=flags,
        help=words,
        group=group,
        converter=_as_written,
        show=is_shown,
        negative=f"--no-{flags[0].removeprefix('--')}" if default is True else (),
        show_default=False if default is None else lambda _: _default_text(default),
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, parameter]
    )


def _default_text(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _as_written(_type: Any, tokens: Sequence[Token]) -> Any:
    token = tokens[0]
    return token.value or token.implicit_value if isinstance(token.implicit_value, bool) else token.value


def with_flags(
    function: Callable[..., None], parameters: Sequence[inspect.Parameter], doc: str | None = None, more: str = ""
) -> Callable[..., None]:
    """Return the function with `**settings` in its signature replaced by named flags.

    Args:
        function: Function of the verb.
        parameters: Flags in addition to its own parameters.
        doc: Help text, if not the function's own docstring.
        more: Last lines of the help.
    """
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]

    def command(*args: Any, **kwargs: Any) -> None:
        function(*args, **in_tables(kwargs))

    command.__doc__ = doc or function.__doc__
    command.more_help = more  # type: ignore[attr-defined]
    command.__signature__ = inspect.Signature([*own, *parameters])  # type: ignore[attr-defined]
    return command


def in_tables(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, with options of a strategy, or settings of a table, in a table under its name."""
    tables: dict[str, Any] = {}
    for name, value in settings.items():
        strategy, is_option, option = name.partition(_BETWEEN)
        if not is_option:
            tables[name] = value
        elif value is not None:
            tables.setdefault(strategy, {})[option] = value
    return tables


def spell_out_truths(tokens: Sequence[str], more: Collection[inspect.Parameter] = ()) -> list[str]:
    """Rewrite `--shuffle false` and `--no-compile` as `--shuffle=false` and `--compile=false`.

    The parser accepts a value for a boolean flag only in this form. `--no-compile`, which is useful only against a TOML
    file or the environment, does not appear in `--help`.

    Args:
        tokens: Tokens as written by the user.
        more: Parameters of flags other than the settings.
    """
    booleans = {flag_name(name) for name in setting_names() if bool in kinds(field_of(name))}
    booleans |= {_flag_of(parameter) for parameter in more if bool in get_args(get_args(parameter.annotation)[0])}
    spelled: list[str] = []
    for token in map(_with_dashes, tokens):
        if spelled and spelled[-1] in booleans and token.lower() in _TRUTH_WORDS:
            spelled[-1] += f"={token}"
        elif token.startswith("--no-") and "--" + token.removeprefix("--no-") in booleans:
            spelled.append(f"--{token.removeprefix('--no-')}=false")
        else:
            spelled.append(token)
    return spelled


def _flag_of(parameter: inspect.Parameter) -> str:
    (flag,) = get_args(parameter.annotation)[1].name
    return str(flag)


def _with_dashes(token: str) -> str:
    """Write the flag of an option with dashes, as in `--help`; the name of a strategy may have underscores."""
    flag, is_one, value = token.partition("=")
    return f"{flag.replace('_', '-')}{is_one}{value}" if _OPTION.fullmatch(flag) else token
