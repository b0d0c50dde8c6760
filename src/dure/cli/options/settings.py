"""Flags made of `RunSpec`'s fields, so that a new setting is a new flag without a line here."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from cyclopts import Group, Parameter, Token

from dure.spec import GROUPS, OTHER_NAMES, SETTINGS, RunSpec, flag_name, kinds

_TRUTH_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0"})
_NOT_FLAGS = frozenset({"task", "task_options"})


def setting_names() -> tuple[str, ...]:
    """Return the settings that are flags: all but the task and its options."""
    return tuple(name for name in SETTINGS if name not in _NOT_FLAGS)


def flag_parameters(names: Iterable[str]) -> list[inspect.Parameter]:
    """Make one keyword parameter of each setting, in groups as `--help` shows them.

    What the user wrote is handed on as text: `resolve` checks it together with all other sources, so that every
    fault is reported at once. What the user left out stays None.
    """
    wanted = set(names)
    parameters = []
    for title, fields in GROUPS.items():
        group = Group.create_ordered(title)
        parameters += [_flag_parameter(name, group) for name in fields if name in wanted]
    return parameters


def flag_names(name: str) -> tuple[str, ...]:
    """Return a setting's flag, and its other names."""
    return (flag_name(name), *(flag_name(other) for other, own in OTHER_NAMES.items() if own == name))


def _flag_parameter(name: str, group: Group) -> inspect.Parameter:
    info = RunSpec.model_fields[name]
    (kind,) = kinds(info)
    words = info.description
    if get_origin(kind) is Literal:
        words = f"{words} [choices: {', '.join(get_args(kind))}]"
    if kind is not bool:
        # the parser would refuse a wrong word or number by itself, before the other settings are looked at; `--help`
        # shows the name
        kind = str if get_origin(kind) is Literal else type(kind.__name__, (str,), {})
    default = info.default
    parameter = Parameter(
        name=flag_names(name),
        help=words,
        group=group,
        converter=_as_written,
        negative=None if default is True else (),
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
    function: Callable[..., None], parameters: Sequence[inspect.Parameter], doc: str | None = None
) -> Callable[..., None]:
    """Return the function with `**settings` in its signature replaced by named flags."""
    own = [p for p in inspect.signature(function).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]

    def command(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)

    command.__doc__ = doc or function.__doc__
    command.__signature__ = inspect.Signature([*own, *parameters])  # type: ignore[attr-defined]
    return command


def spell_out_truths(tokens: Sequence[str]) -> list[str]:
    """Write `--shuffle false` and `--no-compile` as `--shuffle=false` and `--compile=false`.

    The parser gives a value to a flag without one only in this form; and `--no-compile`, of use only against a
    TOML file or the environment, is kept out of `--help`.
    """
    booleans = {flag_name(name) for name in setting_names() if bool in kinds(RunSpec.model_fields[name])}
    spelled: list[str] = []
    for token in tokens:
        if spelled and spelled[-1] in booleans and token.lower() in _TRUTH_WORDS:
            spelled[-1] += f"={token}"
        elif token.startswith("--no-") and "--" + token.removeprefix("--no-") in booleans:
            spelled.append(f"--{token.removeprefix('--no-')}=false")
        else:
            spelled.append(token)
    return spelled
