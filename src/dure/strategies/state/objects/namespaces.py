"""Values that are not searched, and holders of state that are no objects: global variables, classes and slots."""

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dure.failures.frames import is_installed, is_of_engine
from dure.strategies.state.containers import slots_of

ATOMS = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.Size, range, slice)
"""Kinds of values that never change."""
SEALED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, Dataset, DataLoader)
"""Kinds that hold definitions or data, but no state of the training."""

BUILTIN_METHODS = (types.BuiltinMethodType, types.MethodWrapperType)
"""Kinds of methods that are not written in Python. Python's own functions are of the first kind, too."""


class _Attributes(MutableMapping[str, Any]):
    """Mapping of attributes that are in no `__dict__`."""

    def __len__(self) -> int:
        return len(list(iter(self)))


class _Variables(_Attributes):
    """Mapping of the variables of a module or a class."""

    def __init__(self, owner: Any, is_ours: Callable[[str, Any], bool]) -> None:
        self.owner = owner
        self._is_ours = is_ours

    @property
    def unfiltered(self) -> Mapping[str, Any]:
        """All current variables of the owner."""
        variables: Mapping[str, Any] = vars(self.owner)
        return variables

    def __getitem__(self, name: str) -> Any:
        return vars(self.owner)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.owner, name)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, value in vars(self.owner).items() if self._is_ours(name, value)])


class _Slots(_Attributes):
    """Mapping of the attributes of an object with `__slots__`, including those of its `__dict__`."""

    def __init__(self, owner: Any) -> None:
        cls: Any = type(owner)
        self._owner = owner
        self._names = slots_of(cls)

    def __getitem__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in (*self._names, *(_dict_of(self._owner) or ())) if name in self])


def _dict_of(value: object) -> MutableMapping[str, Any] | None:
    if isinstance(value, threading.local):
        return value.__dict__
    try:
        found = object.__getattribute__(value, "__dict__")  # an object's own `__getattr__` may raise anything
    except AttributeError:
        return None
    return found if isinstance(found, MutableMapping) else None


class UnsavedBuffers(_Attributes):
    """Mapping of the buffers of a module that are in no `state_dict` (`persistent=False`)."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers, self._names = module._buffers, module._non_persistent_buffers_set

    def __getitem__(self, name: str) -> Any:
        return self._buffers[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._buffers[name] = value
        self._names.add(name)

    def __delitem__(self, name: str) -> None:
        del self._buffers[name]
        self._names.discard(name)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._buffers if name in self._names])


class Variables:
    """Object whose `vars` are a mapping."""

    __slots__ = ("_mapping",)

    def __init__(self, mapping: MutableMapping[str, Any]) -> None:
        self._mapping = mapping

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        """Attributes, as a mapping."""
        return self._mapping


def with_dict(value: object) -> object | None:
    """Return an object whose `vars` are the attributes of `value`, including those in slots; None if it has none."""
    if isinstance(value, Namespace | Variables):
        return value
    cls: Any = type(value)
    if cls.__module__ != "builtins" and slots_of(cls):
        return Variables(_Slots(value))
    return None if _dict_of(value) is None else value


class Namespace:
    """Object whose attributes are the variables of a module or a class."""

    __slots__ = ("_variables",)

    def __init__(self, owner: Any, is_ours: Callable[[str, Any], bool]) -> None:
        """Select some variables.

        Args:
            owner: Module or class.
            is_ours: Whether a variable is selected, by name and value.
        """
        object.__setattr__(self, "_variables", _Variables(owner, is_ours))

    @property
    def owner(self) -> Any:
        """Module or class of the variables."""
        return getattr(self._variables, "owner", None)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        """Variables as a mapping; changes of the mapping change them."""
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


class _FunctionVariables(_Attributes):
    """Mapping of the variables that a function keeps between calls: of its closure, default values, attributes."""

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function
        names = function.__code__.co_freevars
        self._cells = dict(zip(names, function.__closure__ or (), strict=True))

    def _defaults(self) -> dict[str, int]:
        code, values = self._function.__code__, self._function.__defaults__
        if not values:
            return {}
        names = code.co_varnames[: code.co_argcount]
        return {name: place for place, name in enumerate(names[len(names) - len(values) :])}

    def __getitem__(self, name: str) -> Any:
        if name in self._cells:
            try:
                return self._cells[name].cell_contents
            except ValueError:  # the variable is not assigned yet
                raise KeyError(name) from None
        if name in (places := self._defaults()):
            return (self._function.__defaults__ or ())[places[name]]
        if name in (by_keyword := self._function.__kwdefaults__ or {}):
            return by_keyword[name]
        return vars(self._function)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._cells:
            self._cells[name].cell_contents = value
        elif name in (places := self._defaults()):
            values = list(self._function.__defaults__ or ())
            values[places[name]] = value
            self._function.__defaults__ = tuple(values)
        elif name in (self._function.__kwdefaults__ or {}):
            self._function.__kwdefaults__ = {**(self._function.__kwdefaults__ or {}), name: value}
        else:
            vars(self._function)[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self._cells:
            del self._cells[name].cell_contents
        else:
            del vars(self._function)[name]

    def __iter__(self) -> Iterator[str]:
        filled = [name for name in self._cells if name in self]
        by_keyword = self._function.__kwdefaults__ or {}
        return iter(dict.fromkeys((*filled, *self._defaults(), *by_keyword, *vars(self._function))))


class FunctionState(Namespace):
    """Object whose attributes are the variables that a function keeps between calls."""

    __slots__ = ()

    def __init__(self, function: types.FunctionType) -> None:
        """Select the variables of a function."""
        object.__setattr__(self, "_variables", _FunctionVariables(function))


def class_variables(cls: type) -> Namespace:
    """Return the variables of a class that are no definitions."""
    return Namespace(cls, _is_variable)


_DESCRIPTORS = (property, classmethod, staticmethod, functools.cached_property)


def _is_variable(name: str, value: Any) -> bool:
    is_definition = isinstance(value, (*SEALED, *_DESCRIPTORS)) or (
        (callable(value) or hasattr(value, "__get__")) and not _is_callable_object(value)
    )
    return not is_definition and not (name.startswith("__") and name.endswith("__")) and not name.startswith("_abc_")


def _is_callable_object(value: Any) -> bool:
    """Return whether a value that can be called, or is a descriptor, is an object with state: a criterion, say."""
    return isinstance(value, nn.Module | functools.partial) or is_users(type(value))


def is_users(cls: Any) -> bool:
    """Return whether a class or function is neither dure's nor a library's."""
    module = sys.modules.get(getattr(cls, "__module__", None) or "")
    return module is not None and is_users_module(module)


def is_users_module(module: types.ModuleType) -> bool:
    """Return whether a module is neither dure's nor a library's."""
    package = module.__name__.partition(".")[0]
    is_library = package in ("dure", "torch") or (package in sys.stdlib_module_names and package != "__main__")
    file = getattr(module, "__file__", None) or ""
    return not (is_library or is_installed(file) or is_of_engine(file))
