"""Options of a task: the keywords of its `__init__`, converted from text or JSON and back."""

import dataclasses
import inspect
import json
import textwrap
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, InitVar
from typing import Any

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from dure.errors import TaskInvalid
from dure.failures.frames import traceback_in_user_code
from dure.spec import unknown_name
from dure.training.task.digests import digest
from dure.training.task.task import Task

_KIND_OF_DEFAULT: Mapping[type, Any] = {bool: bool, int: int | float, float: float, str: str}
"""Declared type of a keyword without annotation, by the type of its default."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskOption:
    """One keyword of a task's `__init__`."""

    name: str
    kind: Any
    """Declared type; `Any` if there is none, or a `str` with an annotation that could not be resolved."""
    default: Any = inspect.Parameter.empty
    default_factory: Callable[[], Any] | None = None

    @property
    def is_required(self) -> bool:
        return self.default is inspect.Parameter.empty and self.default_factory is None

    def shown_default(self) -> Any:
        """Return the default for `--help`, or None if there is none."""
        if self.default_factory is not None:
            return self.default_factory()
        return None if self.is_required else self.default


def task_options(cls: type[Task]) -> dict[str, TaskOption]:
    """Return the task's own options by name: its annotated fields, or the keywords of its own `__init__`."""
    options: dict[str, TaskOption] = {}
    for base in cls.__mro__:
        init = vars(base).get("__init__")
        if init is None or base is object:
            continue
        hints = _hints(cls if not _is_written(base) else init)
        parameters = list(inspect.signature(init).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                options.setdefault(parameter.name, _option(cls, parameter, hints))
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            break  # otherwise it passes keywords on to the next `__init__`
    return options


def _is_written(cls: type) -> bool:
    return not issubclass(cls, Task) or cls._has_own_init


def _option(cls: type[Task], parameter: inspect.Parameter, hints: Mapping[str, Any]) -> TaskOption:
    name, default = parameter.name, parameter.default
    kind = hints.get(name, Any if parameter.annotation is parameter.empty else parameter.annotation)
    if kind is Any:
        kind = _KIND_OF_DEFAULT.get(type(default), Any)
    if isinstance(kind, InitVar):
        kind = kind.type
    field = cls.__dataclass_fields__.get(name)  # type: ignore[attr-defined]
    if field is not None and field.default_factory is not MISSING:
        return TaskOption(name=name, kind=kind, default_factory=field.default_factory)
    return TaskOption(name=name, kind=kind, default=default)


def _hints(of: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(of, include_extras=True)
    except (NameError, TypeError):  # a name known only to a type checker, or to a function around the class
        return {}


def build_task(cls: type[Task], options: Mapping[str, Any]) -> Task:
    """Build the task, with its options converted to their declared types.

    Raises:
        TaskInvalid: Options are unknown, missing or of the wrong type; the message lists all of them.
    """
    known = task_options(cls)
    faults = [
        f"{cls.__name__}.{name} is no option, for it has no annotation: write `{name}: {type(vars(cls)[name]).__name__}"
        f" = {vars(cls)[name]!r:.40}`"
        if type(vars(cls).get(name)) in (bool, int, float, str)
        else unknown_name("task option", name, known)
        for name in options
        if name not in known
    ]
    values: dict[str, Any] = {}
    for name, option in known.items():
        if name in options:
            try:
                values[name] = _converted(option, options[name])
            except ValueError as error:
                faults.append(f"task option {name} is {options[name]!r} but {error}")
        elif option.is_required:
            faults.append(f"task option {name} has no value: give --task.{name.replace('_', '-')}")
    if faults:
        raise TaskInvalid("; ".join(faults))
    try:
        return cls(**values)
    except (Exception, SystemExit) as error:
        shown = textwrap.indent(traceback_in_user_code(error), "  ")
    # outside the handler: the message contains the user's lines, and Python would show them and ours again
    raise TaskInvalid(f"{cls.__name__} cannot be made{_POSITIONAL if _takes_positions(cls) else ''}:\n{shown}")


_POSITIONAL = " (dure passes options by keyword: let its __init__ take them so)"


def _takes_positions(cls: type[Task]) -> bool:
    kinds = {parameter.kind for parameter in inspect.signature(cls).parameters.values()}
    return inspect.Parameter.POSITIONAL_ONLY in kinds


def _converted(option: TaskOption, value: Any) -> Any:
    """Convert a value to its declared type.

    Raises:
        ValueError: The value cannot be converted; the message says what it should be.
    """
    try:
        return _adapter(option).validate_python(value)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"].partition(",")[0].removeprefix("Input ")) from None


def _adapter(option: TaskOption) -> TypeAdapter[Any]:
    """Return a converter to an option's declared type.

    Raises:
        ValueError: There is none.
    """
    if isinstance(option.kind, str):
        raise ValueError(
            f"its type {option.kind} cannot be resolved: import or define it where the class is defined, and not under "
            "TYPE_CHECKING or in a function"
        )
    try:
        return TypeAdapter(option.kind)
    except PydanticSchemaGenerationError:
        kind = getattr(option.kind, "__name__", option.kind)
        raise ValueError(
            f"its type {kind} cannot be made from text or JSON: declare it as str, and convert it where it is used"
        ) from None


def to_json(option: TaskOption, value: Any) -> Any:
    """Return an option's value as JSON from which `build_task` restores the same value.

    Raises:
        ValueError: There is no such JSON.
    """
    is_declared = option.kind is not Any and not isinstance(option.kind, str)
    try:
        plain = _adapter(option).dump_python(value, mode="json", warnings=False) if is_declared else value
        plain = json.loads(json.dumps(plain), parse_constant=str)
        again = _converted(option, plain) if is_declared else plain
    except (ValueError, TypeError, RecursionError, PydanticSerializationError) as error:
        raise ValueError(str(error)) from None
    if not is_same(again, value):
        raise ValueError("its declared type makes another value of it")
    return plain


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values have the same contents; 1 equals 1.0, and hidden contents are never the same."""
    if {type(one), type(other)} == {int, float}:
        return bool(one == other)  # `rate: float` given as 1
    if type(one) is not type(other):
        return False
    if type(one) in (list, tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if type(one) is dict:
        return list(one) == list(other) and all(is_same(one[key], other[key]) for key in one)
    found = digest(one)
    return found is not None and found == digest(other)


def options_of(task: Task) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a task's options as JSON values, and the names of those that JSON cannot hold."""
    plain, others = {}, []
    for name, option in task_options(type(task)).items():
        try:
            plain[name] = to_json(option, getattr(task, name))
        except AttributeError:
            continue  # `__init__` stores it under another name, if at all
        except ValueError:
            others.append(name)
    return plain, tuple(others)
