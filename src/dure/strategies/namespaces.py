"""Values that are not looked into, and places of state that are no objects: global variables, classes and slots."""

import dis
import functools
import sys
import types
from collections.abc import Callable, Collection, Iterator, MutableMapping
from enum import Enum
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

ATOMS = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.Size, range, slice)
"""Kinds of values that never change."""
SEALED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, Dataset, DataLoader)
"""Kinds that hold definitions or data, not state of the training."""


class _Variables(MutableMapping[str, Any]):
    """Variables of a module or a class, as a mapping."""

    def __init__(self, owner: Any, is_ours: Callable[[str, Any], bool]) -> None:
        self._owner = owner
        self._is_ours = is_ours

    def __getitem__(self, name: str) -> Any:
        return vars(self._owner)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, value in vars(self._owner).items() if self._is_ours(name, value)])

    def __len__(self) -> int:
        return len(list(iter(self)))


class _Slots(MutableMapping[str, Any]):
    """Attributes of an object that has `__slots__`, as a mapping."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        slots = [vars(base).get("__slots__", ()) for base in type(owner).__mro__]
        self._names = [name for names in slots for name in ([names] if isinstance(names, str) else names)]

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._names if hasattr(self._owner, name)])

    def __len__(self) -> int:
        return len(list(iter(self)))


class Slotted:
    """An object with `__slots__`, seen as one with a `__dict__`."""

    __slots__ = ("_mapping",)

    def __init__(self, owner: Any) -> None:
        self._mapping = _Slots(owner)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        """The attributes."""
        return self._mapping


class Namespace:
    """Variables of a module or a class as the attributes of an object."""

    __slots__ = ("_variables",)

    def __init__(self, owner: Any, is_ours: Callable[[str, Any], bool]) -> None:
        """Look at some variables.

        Args:
            owner: Module or class.
            is_ours: Tells which of its variables are meant, by name and value.
        """
        object.__setattr__(self, "_variables", _Variables(owner, is_ours))

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        """The variables; changes of the mapping are changes of them."""
        return self._variables

    def __getattr__(self, name: str) -> Any:
        """Return a variable."""
        try:
            return self._variables[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a variable."""
        self._variables[name] = value


class _FunctionVariables(MutableMapping[str, Any]):
    """Variables that a function keeps between calls, as a mapping: of its closure, default values, attributes."""

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function
        names = function.__code__.co_freevars
        self._cells = dict(zip(names, function.__closure__ or (), strict=True))

    def _defaults(self) -> dict[str, int]:
        code, values = self._function.__code__, self._function.__defaults__ or ()
        names = code.co_varnames[: code.co_argcount]
        return {name: place for place, name in enumerate(names[len(names) - len(values) :])}

    def __getitem__(self, name: str) -> Any:
        if name in self._cells:
            try:
                return self._cells[name].cell_contents
            except ValueError:  # nothing was assigned yet
                raise KeyError(name) from None
        if name in (places := self._defaults()):
            return (self._function.__defaults__ or ())[places[name]]
        return vars(self._function)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._cells:
            self._cells[name].cell_contents = value
        elif name in (places := self._defaults()):
            values = list(self._function.__defaults__ or ())
            values[places[name]] = value
            self._function.__defaults__ = tuple(values)
        else:
            vars(self._function)[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self._cells:
            del self._cells[name].cell_contents
        else:
            del vars(self._function)[name]

    def __iter__(self) -> Iterator[str]:
        filled = [name for name in self._cells if name in self]
        return iter(dict.fromkeys((*filled, *self._defaults(), *vars(self._function))))

    def __contains__(self, name: object) -> bool:
        try:
            self[name]  # type: ignore[index]
        except KeyError:
            return False
        return True

    def __len__(self) -> int:
        return len(list(iter(self)))


class FunctionState(Namespace):
    """Variables that a function keeps between calls as the attributes of an object."""

    __slots__ = ()

    def __init__(self, function: types.FunctionType) -> None:
        """Look at a function."""
        object.__setattr__(self, "_variables", _FunctionVariables(function))


def used_globals(*classes: type) -> dict[str, object]:
    """Return what functions of a user's classes may keep state in beside their objects.

    These are the global variables of their modules that the functions name, where they hold state, those that the
    functions assign to, the classes' own variables, and functions with closures, attributes or default values that can
    change. Classes and modules among them are left out.
    """
    found: dict[str, object] = {}
    for base in dict.fromkeys(base for cls in classes for base in cls.__mro__ if is_users(base)):
        module = sys.modules[base.__module__]
        functions = [member for member in vars(base).values() if isinstance(member, types.FunctionType)]
        names = {name for function in functions for name in function.__code__.co_names} & vars(module).keys()
        values = {f"global {name}": vars(module)[name] for name in names}
        found |= {name: value for name, value in values.items() if _may_keep_state(value)}
        found |= {f"{function.__qualname__}": function for function in functions if _may_keep_state(function)}
        if assigned := {name for function in functions for name in _assigned(function)}:
            found[f"globals of {base.__qualname__}"] = Namespace(module, _named(assigned))
        found[f"class {base.__qualname__}"] = Namespace(base, _is_variable)
    return found


def _may_keep_state(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        keeps = any(not isinstance(held, (*ATOMS, *SEALED)) for held in value.__defaults__ or ())
        return is_users(value) and (keeps or bool(value.__closure__) or bool(vars(value)))
    return not isinstance(value, (*ATOMS, *SEALED))


def is_users(cls: Any) -> bool:
    """Return whether a class or function is neither dure's nor a library's."""
    package = cls.__module__.partition(".")[0]
    module = sys.modules.get(cls.__module__)
    is_library = package in ("dure", "torch") or (package in sys.stdlib_module_names and package != "__main__")
    return module is not None and not is_library and "-packages" not in (getattr(module, "__file__", None) or "")


def _assigned(function: types.FunctionType) -> set[str]:
    return {one.argval for one in dis.get_instructions(function) if one.opname == "STORE_GLOBAL"}


def _named(names: Collection[str]) -> Callable[[str, Any], bool]:
    return lambda name, value: name in names


_DESCRIPTORS = (property, classmethod, staticmethod, functools.cached_property)


def _is_variable(name: str, value: Any) -> bool:
    is_definition = isinstance(value, (*SEALED, *_DESCRIPTORS)) or callable(value) or hasattr(value, "__get__")
    return not is_definition and not (name.startswith("__") and name.endswith("__")) and not name.startswith("_abc_")
