"""Containers of any class, decomposed into their items and rebuilt with other items.

Batches and outputs are tuples, dictionaries, dataclasses, and classes that libraries derive from these. A rebuilt
container keeps its class and all its other content. None of its own code runs: no `__init__`, `__post_init__`,
`__setattr__` or `__setitem__`.
"""

import functools
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from operator import is_
from types import MappingProxyType, MethodType, SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dure.errors import TaskInvalid
from dure.strategies.state.not_gathered import NotGathered

Key = tuple[Literal["item", "attribute"], Any]
"""Position of a value in its container: an index or a key of a mapping, or an attribute's name."""

Path = tuple[Key, ...]
"""Position of a value in nested containers, the outermost first."""

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range, NotGathered})
"""Classes of values that are no containers; most values belong to one of them."""

_LONG = 64
"""Number of items from which it pays to check their classes first."""

_NO_CONTAINERS = (Tensor, nn.Module, np.ndarray, torch.Size, str, bytes, bytearray, memoryview, range, type)


def items_of(value: Any) -> dict[Key, Any] | None:
    """Return a container's values by their keys; None if it is no container of a known kind.

    For a container of a derived class they include its attributes.
    """
    cls = _class_of(value)
    if cls is tuple or cls is list:
        return {("item", index): item for index, item in enumerate(value)}
    if cls is dict:
        return {("item", key): item for key, item in value.items()}
    kind = _kind(cls)
    if kind is None:
        return None
    items: dict[Key, Any] = {}
    if kind == "sequence":
        items = {("item", index): item for index, item in enumerate(value)}
    elif kind == "mapping":
        # a derived class may hide or change items when they are read
        pairs = dict.items(value) if isinstance(value, dict) else value.items()
        items = {("item", key): item for key, item in pairs}
    items.update({("attribute", name): item for name, item in attributes_of(value).items()})
    return items


def rebuilt(value: Any, items: Mapping[Key, Any]) -> Any:
    """Return a container of the same class with other values under the same keys.

    Raises:
        TaskInvalid: The class cannot be rebuilt without its own code.
    """
    cls = _class_of(value)
    if cls is dict:
        return {key: items["item", key] for key in value}
    own = [items["item", index] for index in range(len(value))] if _kind(cls) == "sequence" else []
    if cls is tuple or cls is list:
        return cls(own)
    try:
        new = _empty_like(value, own)
        if isinstance(value, dict):
            put = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
            for key in dict.keys(value):
                put(new, key, items["item", key])
        elif isinstance(value, MappingProxyType):
            return MappingProxyType({key: items["item", key] for key in value})
    except TypeError as error:
        raise TaskInvalid(
            f"a {cls.__name__} cannot be built again with other tensors ({error}): give them in a dataclass, a "
            "dictionary or a tuple"
        ) from error
    for (kind, name), item in items.items():
        if kind == "attribute":
            set_attribute(new, name, item)
    return new


def resized(value: Any, items: Sequence[Any]) -> Any:
    """Return a list or tuple of the same class with other items, of any number."""
    if type(value) in (list, tuple):
        return type(value)(items)
    new = _empty_like(value, list(items))
    for name, item in attributes_of(value).items():
        set_attribute(new, name, item)
    return new


def is_container(value: Any) -> bool:
    """Return whether `items_of` can decompose a value."""
    return _kind(_class_of(value)) is not None


def is_sequence(value: Any) -> bool:
    """Return whether a value is a list or a tuple whose positions have no names."""
    return _kind(_class_of(value)) == "sequence" and not hasattr(value, "_fields") and not _is_of_c(type(value))


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of one object, including those in slots, by their names."""
    slots = slots_of(_class_of(value))
    found = {name: object.__getattribute__(value, name) for name in slots if _has_slot(value, name)}
    return found | getattr(value, "__dict__", {})


def set_attribute(value: Any, name: str, item: Any) -> None:
    """Set an attribute of one object without running its own code."""
    if hasattr(value, "__dict__") and name not in slots_of(_class_of(value)):
        value.__dict__[name] = item
    else:
        object.__setattr__(value, name, item)


def map_leaves(
    value: Any,
    change: Callable[[Any], Any],
    is_leaf: Callable[[Any], bool] = lambda _: False,
    *,
    copies: bool = False,
) -> Any:
    """Apply `change` to every value in nested containers that is no container itself.

    Identical objects stay identical. A container in which nothing changes is returned as it is.

    Args:
        value: Any nested structure.
        change: Called once with each value.
        is_leaf: Whether `change` takes a container as a whole.
        copies: Return a new container for each one that could be changed in place.
    """
    return _Mapping(change, is_leaf, copies).of(value)


def _is_vocabulary(value: Any) -> bool:
    """Return whether a value is a long list or dictionary of plain values only, checked at the speed of C."""
    if (type(value) is not list and type(value) is not dict) or len(value) < _LONG:
        return False
    return set(map(type, value.values() if type(value) is dict else value)) <= _PLAIN


class _Mapping:
    def __init__(self, change: Callable[[Any], Any], is_leaf: Callable[[Any], bool], copies: bool) -> None:
        self._change = change
        self._is_leaf = is_leaf
        self._copies = copies
        self._done: dict[int, Any] = {}
        """New values by the id of the old ones, which the structure keeps alive."""

    def of(self, value: Any) -> Any:
        cls = type(value)
        if cls in _PLAIN:
            return value
        if id(value) in self._done:
            return self._done[id(value)]
        # the most frequent cases first: calls of a model pass through here
        if _is_vocabulary(value):
            found = value.copy() if self._copies else value
        elif cls is tuple or cls is list:
            changed = [self.of(item) for item in value]
            found = value if self._is_kept(value, changed, value) else cls(changed)
        elif cls is dict:
            own = {key: self.of(item) for key, item in value.items()}
            found = value if self._is_kept(value, own.values(), value.values()) else own
        else:
            found = self._of_other(value)
        self._done[id(value)] = found
        return found

    def _of_other(self, value: Any) -> Any:
        items = None if isinstance(value, Tensor) or self._is_leaf(value) else items_of(value)
        if items is None:
            return self._change(value)
        self._done[id(value)] = value  # for a container that holds itself
        changed = {key: self.of(item) for key, item in items.items()}
        return value if self._is_kept(value, changed.values(), items.values()) else rebuilt(value, changed)

    def _is_kept(self, value: Any, changed: Iterable[Any], items: Iterable[Any]) -> bool:
        return not (self._copies and not isinstance(value, tuple)) and all(map(is_, changed, items))


def are_same(one: Any, other: Any, known: dict[tuple[int, int], bool] | None = None) -> bool:
    """Return whether two values are one object, equal numbers or strings, or containers of such.

    Args:
        one: Any value.
        other: Value to compare with it.
        known: Cache of results for containers, for further comparisons of values that live as long.
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) in _PLAIN:
        return type(one) is not NotGathered and bool(one == other)
    if isinstance(one, MethodType | set):
        return bool(one == other)
    if (type(one) is list or type(one) is tuple) and len(one) == len(other) and all(map(is_, one, other)):
        return True
    if type(one) is dict and len(one) == len(other) and all(map(is_, one.values(), other.values())):
        return list(one) == list(other)
    known = {} if known is None else known
    pair = (id(one), id(other))
    if pair not in known:
        known[pair] = True  # for containers that hold themselves
        items, others = (None, None) if isinstance(one, Tensor) else (items_of(one), items_of(other))
        known[pair] = (
            items is not None
            and others is not None
            and items.keys() == others.keys()
            and all(are_same(item, others[key], known) for key, item in items.items())
        )
    return known[pair]


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors that a value holds, including those in the attributes of objects of unknown classes."""
    found: dict[int, Tensor] = {}
    seen: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if type(one) in _PLAIN or id(one) in seen or _is_vocabulary(one):
            continue
        seen[id(one)] = one
        if isinstance(one, Tensor):
            found[id(one)] = one
        elif not isinstance(one, nn.Module | type):
            items = items_of(one)
            waiting.extend(_held_by(one) if items is None else items.values())
    return list(found.values())


def _held_by(value: Any) -> list[Any]:
    """Return the contents of an object whose class is no known container."""
    if callable(value) or isinstance(value, np.ndarray):
        return []
    inside = list(value) if isinstance(value, set | frozenset) else []
    return inside + list(attributes_of(value).values())


def path_text(path: Path, name: str) -> str:
    """Return a path as the Python expression that reads its value."""
    return name + "".join(f".{key}" if kind == "attribute" else f"[{key!r}]" for kind, key in path)


# classes


def _class_of(value: Any) -> Any:
    return type(value)  # mypy does not consider a class hashable


@functools.cache
def _kind(cls: type) -> Literal["sequence", "mapping", "attributes"] | None:
    if issubclass(cls, _NO_CONTAINERS):
        return None
    if issubclass(cls, tuple | list | deque):
        return "sequence"
    if issubclass(cls, dict | MappingProxyType):
        return "mapping"
    is_record = is_dataclass(cls) or hasattr(cls, "__attrs_attrs__") or issubclass(cls, SimpleNamespace)
    # these certainly hold their items in attributes: there is no C code below them
    has_items = issubclass(cls, UserDict | UserList | Mapping | Sequence) and cls.__flags__ & _HEAP_TYPE
    return "attributes" if is_record or has_items else None


_HEAP_TYPE = 1 << 9
"""Flag of classes made by a `class` statement (`Py_TPFLAGS_HEAPTYPE`)."""


@functools.cache
def slots_of(cls: type) -> tuple[str, ...]:
    """Return the names of the attributes in the slots of a class and its bases, as they are looked up."""
    names: list[str] = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                is_private = name.startswith("__") and not name.endswith("__")
                names.append(f"_{base.__name__.lstrip('_')}{name}" if is_private else name)
    # the slots of a namedtuple's base are empty: its items are those of a tuple
    return tuple(dict.fromkeys(names))


def _has_slot(value: Any, name: str) -> bool:
    try:
        object.__getattribute__(value, name)
    except AttributeError:
        return False
    return True


def _empty_like(value: Any, items: list[Any]) -> Any:
    """Return a new object of the same class: a sequence with its items, anything else empty."""
    cls: Any = type(value)
    if isinstance(value, tuple):
        return cls(items) if _is_of_c(cls) else tuple.__new__(cls, items)
    if isinstance(value, deque):
        new = deque.__new__(cls)
        deque.__init__(new, items, value.maxlen)
        return new
    if isinstance(value, list):
        new = list.__new__(cls)
        list.extend(new, items)
        return new
    if isinstance(value, dict):
        base = next(base for base in (OrderedDict, defaultdict, dict) if isinstance(value, base))
        new = base.__new__(cls)
        if isinstance(value, defaultdict):
            new.default_factory = value.default_factory
        return new
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace.__new__(cls)
    return None if isinstance(value, MappingProxyType) else object.__new__(cls)


def _is_of_c(cls: type) -> bool:
    """Return whether a class of named tuples is written in C, such as the return type of `torch.max`."""
    return hasattr(cls, "n_sequence_fields")
