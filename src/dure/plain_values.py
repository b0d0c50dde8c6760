"""Records from plain JSON values, as a peer or another process gives them: a misfit is refused with the reason."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from dure.documents import DocumentInvalid

T = TypeVar("T")
_MOST_SHOWN = 40
"""Longest value in a reason, in characters."""


def from_plain(kind: type[T], value: Any) -> T:
    """Return a dataclass's instance from `dataclasses.asdict`'s answer, as it comes out of JSON.

    Its fields are plain values, `X | None`, tuples, lists, mappings and such dataclasses in turn; `Any` fits all.

    Raises:
        DocumentInvalid: A field is missing, unknown, or not of its type.
    """
    record: T = _record(kind, value, kind.__name__)
    return record


def _record(kind: Any, value: Any, name: str) -> Any:
    if not isinstance(value, Mapping):
        raise _misfit(name, value, "an object")
    types = _types(kind)
    if unknown := [key for key in value if key not in types]:
        raise DocumentInvalid(f"{name} has a field {str(unknown[0])[:_MOST_SHOWN]!r}, which is not known")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    missing = [key for key in fields if key not in value and _is_needed(fields[key])]
    if missing:
        raise DocumentInvalid(f"{name} has no field {missing[0]!r}")
    return kind(**{key: _read(types[key], found, f"{name}.{key}") for key, found in value.items()})


@cache
def _types(kind: Any) -> dict[str, Any]:
    types = get_type_hints(kind)
    return {field.name: types[field.name] for field in dataclasses.fields(kind)}


def _is_needed(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _read(kind: Any, value: Any, name: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in arguments:
            return None
        (kind,) = (one for one in arguments if one is not NoneType)
        return _read(kind, value, name)
    if origin is tuple and arguments[-1] is not ...:
        if not isinstance(value, list | tuple) or len(value) != len(arguments):
            raise _misfit(name, value, f"{len(arguments)} values")
        return tuple(_read(one, found, name) for one, found in zip(arguments, value, strict=True))
    if origin in (tuple, list, Sequence):
        if not isinstance(value, list | tuple):
            raise _misfit(name, value, "a list")
        items = [_read(arguments[0], found, name) for found in value]
        return tuple(items) if origin is tuple else items
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _misfit(name, value, "an object")
        return {_key(arguments[0], key, name): _read(arguments[1], found, name) for key, found in value.items()}
    if kind is Any:
        return value
    return _record(kind, value, name) if dataclasses.is_dataclass(kind) else _simple(kind, value, name)


def _key(kind: type, key: Any, name: str) -> Any:
    """Return a key, which JSON has made a string of."""
    if kind is int and isinstance(key, str) and key.isdecimal():
        return int(key)
    return _simple(kind, key, name)


def _simple(kind: type, value: Any, name: str) -> Any:
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise _misfit(name, value, "a number") from None
    if type(value) is not kind:
        raise _misfit(name, value, f"of type {kind.__name__}")
    return value


def _misfit(name: str, value: Any, wanted: str) -> DocumentInvalid:
    shown = repr(value)
    shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"
    return DocumentInvalid(f"{name} is {shown} but must be {wanted}")
