"""Places where functions of a user's classes keep state outside their objects: global variables, classes, functions."""

import contextlib
import dis
import functools
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from dure.strategies.state.objects.namespaces import (
    ATOMS,
    SEALED,
    Namespace,
    class_variables,
    is_users,
    is_users_module,
)
from dure.strategies.state.objects.object_state import ObjectState


def state_outside(task: object, model: nn.Module, *others: object) -> dict[str, object]:
    """Return the objects in which a task, its model, others, and what they hold may keep state outside themselves.

    A criterion that was given to the task, or that it found by name, has code of its own; so have an optimiser and its
    hooks.
    """
    named = {f"other {number}": other for number, other in enumerate(others)}
    held = ObjectState({"task": task, "model": model, **named}).first.values()
    found = (_definition_of(value) for value in held)
    return used_globals(
        type(task), *dict.fromkeys(type(m) for m in model.modules()), *(each for each in found if each is not None)
    )


def _definition_of(value: object) -> type | types.FunctionType | None:
    """Return the class of an object of a user's, or a user's function or class itself; None for anything else."""
    while isinstance(value, types.MethodType | functools.partial):
        value = value.__self__ if isinstance(value, types.MethodType) else value.func
    found = value if isinstance(value, type | types.FunctionType) else type(value)
    return found if is_users(found) else None


def used_globals(*definitions: type | types.FunctionType) -> dict[str, object]:
    """Return the objects in which a user's functions, and those of classes, may keep state outside their objects.

    These are global variables that hold state or are assigned to, classes' own variables, and functions with closures,
    attributes or default values that can change. Functions and classes of the user's own to which the functions refer
    are searched as well.
    """
    found = _Used()
    for each in dict.fromkeys(definitions):
        found.add(each)
    return found.all()


class _Used:
    """Places of state that functions use, by the names with which their paths begin."""

    def __init__(self) -> None:
        self._found: dict[str, object] = {}
        self._assigned: dict[str, tuple[types.ModuleType, set[str]]] = {}
        self._seen: dict[int, object] = {}

    def all(self) -> dict[str, object]:
        assigned = {
            f"globals of {name}": Namespace(module, _named(names)) for name, (module, names) in self._assigned.items()
        }
        return self._found | assigned

    def add(self, definition: type | types.FunctionType) -> None:
        if isinstance(definition, type):
            self.add_class(definition)
        else:
            self._follow(definition)

    def add_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if id(base) not in self._seen and is_users(base):
                self._seen[id(base)] = base
                self._add(f"class {base.__qualname__}", class_variables(base))
                for name, member in vars(base).items():
                    inner = member.__func__ if isinstance(member, staticmethod | classmethod) else member
                    inner = inner.fget if isinstance(inner, property) else inner
                    if isinstance(inner, functools._lru_cache_wrapper):
                        self._add(f"{base.__qualname__}.{name}", inner)
                    for function in _functions_in(member):
                        if _may_keep_state(function):
                            self._add(function.__qualname__, function)
                        self._follow(function)
                    for definition in _definitions_among(member):
                        self.add(definition)

    def _add(self, name: str, value: object) -> None:
        while name in self._found and self._found[name] is not value:
            name += "'"  # of another module
        self._found[name] = value

    def _follow(self, function: types.FunctionType) -> None:
        if id(function) in self._seen or len(self._seen) > _MOST_DEFINITIONS or not is_users(function):
            return
        self._seen[id(function)] = function
        module = sys.modules.get(function.__globals__.get("__name__", ""))
        if module is None:
            return
        names = _names_in(function.__code__)
        self._assign(module, names.assigned)
        gives = bool(names.stored) or "setattr" in names.all
        self._use(module, sorted(names.read & vars(module).keys()), gives_attributes=gives)
        others = [vars(module)[name] for name in sorted(names.read & vars(module).keys())]
        # in the same order in every process, because paths are distinguished by it
        for other in [*others, *(sys.modules.get(name) for name in sorted(names.imported))]:
            if isinstance(other, types.ModuleType) and other is not module and is_users_module(other):
                self._use(other, sorted(names.all & vars(other).keys()), gives_attributes=gives)
                self._assign(other, names.stored & vars(other).keys())

    def _use(self, module: types.ModuleType, names: Collection[str], *, gives_attributes: bool) -> None:
        for name in names:
            value = vars(module)[name]
            if isinstance(value, type):
                if is_users(value):
                    self.add_class(value)
                continue
            for definition in (*_functions_in(value), *_definitions_among(value)):
                self.add(definition)
            is_given = gives_attributes and isinstance(value, types.FunctionType) and is_users(value)
            if is_given or _may_keep_state(value):
                self._add(f"global {name}", value)

    def _assign(self, module: types.ModuleType, names: Collection[str]) -> None:
        if names:
            # by its file, because a script's module is `__main__` in some processes only
            name = Path(getattr(module, "__file__", None) or module.__name__).stem
            while name in self._assigned and self._assigned[name][0] is not module:
                name += "'"
            self._assigned.setdefault(name, (module, set()))[1].update(names)


_MOST_DEFINITIONS = 2000
"""Maximum number of functions and classes that are searched."""


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yield the functions in a member of a class, or in a global variable."""
    if isinstance(value, types.FunctionType):
        yield value
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # the variable is not assigned yet
                if isinstance(cell.cell_contents, types.FunctionType) and cell.cell_contents is not value:
                    yield cell.cell_contents
    elif isinstance(value, staticmethod | classmethod):
        yield from _functions_in(value.__func__)
    elif isinstance(value, property):
        for each in (value.fget, value.fset, value.fdel):
            yield from _functions_in(each)
    elif isinstance(value, functools.cached_property | functools.partial):
        yield from _functions_in(value.func)
    elif isinstance(value, types.MethodType):
        yield from _functions_in(value.__func__)
    elif isinstance(value, functools._lru_cache_wrapper):
        yield from _functions_in(value.__wrapped__)


def _definitions_among(value: Any) -> list[type | types.FunctionType]:
    """Return the user's functions and classes among the items of a container, such as a register of losses."""
    if not isinstance(value, dict | list | tuple) or len(value) > _MOST_DEFINITIONS:
        return []
    items = [*dict.values(value)] if isinstance(value, dict) else [*value]  # its class's own may load libraries
    return [each for each in map(_definition_of, items) if each is not None]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and that of the functions defined in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _codes(value)


def _may_keep_state(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        keeps = any(not isinstance(held, (*ATOMS, *SEALED)) for held in defaults)
        return is_users(value) and (keeps or bool(value.__closure__) or bool(vars(value)))
    return not isinstance(value, (*ATOMS, *SEALED))


@dataclass(frozen=True)
class _Names:
    """Names in the code of a function and of the functions defined in it, by what the code does with them."""

    all: frozenset[str]
    read: frozenset[str]
    """Names that may be read from the module's variables."""
    assigned: frozenset[str]
    """Names that are assigned to or deleted as global variables."""
    stored: frozenset[str]
    """Names that are assigned to or deleted as attributes."""
    imported: frozenset[str]


@functools.cache  # disassembling takes long, and every session asks twice
def _names_in(code: types.CodeType) -> _Names:
    codes = list(_codes(code))
    operands: defaultdict[str, set[str]] = defaultdict(set)
    for each in codes:
        for one in dis.get_instructions(each):
            if isinstance(one.argval, str):
                operands[one.opname].add(one.argval)

    def of(*operations: str) -> frozenset[str]:
        return frozenset().union(*(operands[operation] for operation in operations))

    everything = frozenset(name for each in codes for name in each.co_names)
    by_string = {text for each in codes for text in each.co_consts if isinstance(text, str)}
    return _Names(
        all=everything,
        read=of("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_FROM") | (by_string if "globals" in everything else set()),
        assigned=of("STORE_GLOBAL", "DELETE_GLOBAL"),
        stored=of("STORE_ATTR", "DELETE_ATTR"),
        imported=of("IMPORT_NAME"),
    )


def _named(names: Collection[str]) -> Callable[[str, Any], bool]:
    return lambda name, value: name in names
