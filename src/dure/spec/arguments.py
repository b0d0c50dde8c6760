"""Spelling of settings in messages: `--nproc 2` on the command line is `nproc=2` in Python."""

import re
import shlex
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from dure.errors import DureError, SpecInvalid
from dure.spec.fields import SETTINGS, field_of, flag_name, kinds

_shows_flags: ContextVar[bool] = ContextVar("speaks flags", default=False)

_MORE_ARGUMENTS = ("config", "resume", "which", "task")
_NAMES = {flag_name(name): name for name in (*SETTINGS, *_MORE_ARGUMENTS)}
_COMMAND = re.compile(r"`dure train --resume (?P<run>[^`]+)`")
_TASK_OPTION = re.compile(r"(?:\bflag )?(?<![\w-])--task\.(?P<name>[A-Za-z][\w-]*)")
_STRATEGY_OPTION = re.compile(
    r"(?P<source>\bflag )?(?<![\w-])--(?P<no>no-)?(?P<strategy>[a-z][a-z0-9-]*)\.(?P<name>[a-z][a-z0-9-]*)"
    r"(?:=(?P<value>true|false))?"
)
_FLAG = re.compile(r"(?<![\w-])(?P<flag>--(?P<no>no-)?(?P<name>[a-z][a-z0-9-]*))(?:[ =](?P<value>[\w.*=,/:-]*\w))?")
_SOURCE = re.compile(r"\bflag --(?P<name>[a-z][a-z0-9-]*)(?!\.)\b")
_OTHER_COMMAND = re.compile(r"(`dure [^`]+`)")


@contextmanager
def flags_in_messages() -> Iterator[None]:
    """Leave flags in errors unchanged: the caller used the command line."""
    token = _shows_flags.set(True)
    try:
        yield
    finally:
        _shows_flags.reset(token)


@contextmanager
def errors_in_arguments() -> Iterator[None]:
    """Replace flags in errors by arguments, unless the caller used the command line."""
    try:
        yield
    except DureError as error:
        if not _shows_flags.get():
            error.args = tuple(as_arguments(part) if isinstance(part, str) else part for part in error.args)
            if isinstance(error, SpecInvalid):
                error.faults = tuple(map(as_arguments, error.faults))
        raise


def in_callers_syntax(text: str) -> str:
    """Return a sentence about flags unchanged, or with arguments if the caller is Python code."""
    return text if _shows_flags.get() else as_arguments(text)


def as_arguments(text: str) -> str:
    """Return a sentence with flags of known settings as keyword arguments of `dure.train`; other commands stay."""
    text = _COMMAND.sub(lambda match: f"`dure.train(resume={_unquoted(match['run'])!r})`", text)
    parts = _OTHER_COMMAND.split(text)
    parts[::2] = map(_without_flags, parts[::2])
    return "".join(parts)


def _unquoted(word: str) -> str:
    try:
        (path,) = shlex.split(word)
    except ValueError:
        return word
    return path


def _without_flags(text: str) -> str:
    text = _TASK_OPTION.sub(lambda match: f"task option {match['name'].replace('-', '_')}", text)
    text = _STRATEGY_OPTION.sub(_as_table, text)
    text = _SOURCE.sub(lambda match: f"argument {match['name'].replace('-', '_')}", text)
    return _FLAG.sub(_as_argument, text)


def _as_table(match: re.Match[str]) -> str:
    """Return the flag of a strategy's option, or of a setting in a table, as the argument that contains it."""
    strategy, option = match["strategy"].replace("-", "_"), match["name"].replace("-", "_")
    if match["source"]:
        return f'argument {strategy}["{option}"]'
    value = "False" if match["no"] else match["value"].capitalize() if match["value"] else "..."
    return f'{strategy}={{"{option}": {value}}}'


def _as_argument(match: re.Match[str]) -> str:
    """Return one flag as an argument, with its value or with the next word of the sentence."""
    name, value = _NAMES.get(f"--{match['name']}"), match["value"]
    behind = match[0][len(match["flag"]) :]
    if name is None:
        return match[0]
    kind = str if name in _MORE_ARGUMENTS else kinds(field_of(name))[0]
    if kind is bool:
        if value in ("true", "false"):
            return f"{name}={value == 'true'}"
        return f"{name}={not match['no']}{behind}"
    if value is None or not _is_value(name, kind, value):
        return f"{name}={behind}"
    return f"{name}={value}" if _NUMBER.fullmatch(value) or value.isupper() else f'{name}="{value}"'


def _is_value(name: str, kind: object, value: str) -> bool:
    """Return whether a word is a value of a setting, and not the next word of the sentence."""
    if value.isupper() or _NUMBER.fullmatch(value):
        return True
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    return any(char in value for char in "=/:*.") or (name == "strategy" and value not in _WORDS)


_NUMBER = re.compile(r"\d[\d.]*")
_WORDS = frozenset({"and", "or", "for", "with", "to", "that", "of", "on", "is", "out", "in", "which", "a", "the"})
