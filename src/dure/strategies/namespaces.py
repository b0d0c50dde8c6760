"""Values that are not looked into, and places of state that are no objects: global variables, classes and slots."""

import contextlib
import dis
import functools
import sys
import types
from collections.abc import Callable, Collection, Iterator, MutableMapping
from enum import Enum
from pathlib import Path
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
    """Attributes of an object that has `__slots__`, those of its `__dict__` included, as a mapping."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._names = _slots(type(owner))

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

    def __contains__(self, name: object) -> bool:
        try:
            self[name]  # type: ignore[index]
        except KeyError:
            return False
        return True

    def __len__(self) -> int:
        return len(list(iter(self)))


def _slots(cls: type) -> list[str]:
    found = []
    for base in cls.__mro__:
        own = vars(base).get("__slots__", ())
        for name in [own] if isinstance(own, str) else own:
            is_private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _dict_of(value: object) -> MutableMapping[str, Any] | None:
    try:
        found = object.__getattribute__(value, "__dict__")  # an object's own `__getattr__` may raise anything
    except AttributeError:
        return None
    return found if isinstance(found, MutableMapping) else None


class Slotted:
    """An object with `__slots__`, seen as one with a `__dict__`."""

    __slots__ = ("_mapping",)

    def __init__(self, owner: Any) -> None:
        self._mapping = _Slots(owner)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        """The attributes."""
        return self._mapping


def with_dict(value: object) -> object | None:
    """Return an object whose `vars` are the attributes of one, those in slots included; None if it has none."""
    if isinstance(value, Namespace):
        return value
    if type(value).__module__ != "builtins" and _slots(type(value)):
        return Slotted(value)
    return None if _dict_of(value) is None else value


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

    These are global variables that hold state or are assigned to, classes' own variables, and functions with closures,
    attributes or default values that can change. Functions and classes of the user's own that the functions name are
    looked into as well.
    """
    found = _Used()
    for cls in dict.fromkeys(classes):
        found.add_class(cls)
    return found.all()


class _Used:
    """Places of state that functions use, by the names that paths of plain state begin with."""

    def __init__(self) -> None:
        self._found: dict[str, object] = {}
        self._assigned: dict[str, tuple[types.ModuleType, set[str]]] = {}
        self._seen: dict[int, object] = {}

    def all(self) -> dict[str, object]:
        assigned = {
            f"globals of {name}": Namespace(module, _named(names)) for name, (module, names) in self._assigned.items()
        }
        return self._found | assigned

    def add_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if id(base) not in self._seen and is_users(base):
                self._seen[id(base)] = base
                self._add(f"class {base.__qualname__}", Namespace(base, _is_variable))
                for member in vars(base).values():
                    for function in _functions_in(member):
                        if _may_keep_state(function):
                            self._add(function.__qualname__, function)
                        self._follow(function)

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
        codes = list(_codes(function.__code__))
        names = {name for code in codes for name in code.co_names}
        self._assign(module, {name for code in codes for name in _operands(code, "STORE_GLOBAL", "DELETE_GLOBAL")})
        stored = {name for code in codes for name in _operands(code, "STORE_ATTR", "DELETE_ATTR")}
        imported = {name for code in codes for name in _operands(code, "IMPORT_NAME")}
        self._use(module, sorted(names & vars(module).keys()))
        others = [vars(module)[name] for name in names & vars(module).keys()]
        for other in [*others, *(sys.modules.get(name) for name in imported)]:
            if isinstance(other, types.ModuleType) and other is not module and is_users_module(other):
                self._use(other, sorted(names & vars(other).keys()))
                self._assign(other, stored & vars(other).keys())

    def _use(self, module: types.ModuleType, names: Collection[str]) -> None:
        for name in names:
            value = vars(module)[name]
            if isinstance(value, type):
                if is_users(value):
                    self.add_class(value)
                continue
            for function in _functions_in(value):
                self._follow(function)
            if _may_keep_state(value):
                self._add(f"global {name}", value)

    def _assign(self, module: types.ModuleType, names: Collection[str]) -> None:
        if names:
            # by its file, for a script's module is `__main__` in some processes only
            name = Path(getattr(module, "__file__", None) or module.__name__).stem
            while name in self._assigned and self._assigned[name][0] is not module:
                name += "'"
            self._assigned.setdefault(name, (module, set()))[1].update(names)


_MOST_DEFINITIONS = 2000
"""Functions and classes that are looked into."""


def _functions_in(value: Any) -> Iterator[types.FunctionType]:
    """Yield the functions that a member of a class, or a global variable, calls."""
    if isinstance(value, types.FunctionType):
        yield value
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # nothing was assigned yet
                if isinstance(cell.cell_contents, types.FunctionType) and cell.cell_contents is not value:
                    yield cell.cell_contents
    elif isinstance(value, staticmethod | classmethod):
        yield from _functions_in(value.__func__)
    elif isinstance(value, property):
        yield from (each for each in (value.fget, value.fset, value.fdel) if isinstance(each, types.FunctionType))
    elif isinstance(value, functools.cached_property | functools.partial):
        yield from _functions_in(value.func)
    elif isinstance(value, types.MethodType):
        yield from _functions_in(value.__func__)
    elif isinstance(value, functools._lru_cache_wrapper):
        yield from _functions_in(value.__wrapped__)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code and that of the functions defined in it."""
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _codes(value)


def _may_keep_state(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        keeps = any(not isinstance(held, (*ATOMS, *SEALED)) for held in value.__defaults__ or ())
        return is_users(value) and (keeps or bool(value.__closure__) or bool(vars(value)))
    return not isinstance(value, (*ATOMS, *SEALED))


def is_users(cls: Any) -> bool:
    """Return whether a class or function is neither dure's nor a library's."""
    module = sys.modules.get(getattr(cls, "__module__", None) or "")
    return module is not None and is_users_module(module)


def is_users_module(module: types.ModuleType) -> bool:
    """Return whether a module is neither dure's nor a library's."""
    package = module.__name__.partition(".")[0]
    is_library = package in ("dure", "torch") or (package in sys.stdlib_module_names and package != "__main__")
    return not is_library and "-packages" not in (getattr(module, "__file__", None) or "")


def _operands(code: types.CodeType, *names: str) -> set[str]:
    return {one.argval for one in dis.get_instructions(code) if one.opname in names}


def _named(names: Collection[str]) -> Callable[[str, Any], bool]:
    return lambda name, value: name in names


_DESCRIPTORS = (property, classmethod, staticmethod, functools.cached_property)


def _is_variable(name: str, value: Any) -> bool:
    is_definition = isinstance(value, (*SEALED, *_DESCRIPTORS)) or callable(value) or hasattr(value, "__get__")
    return not is_definition and not (name.startswith("__") and name.endswith("__")) and not name.startswith("_abc_")
