"""Placeholder for a value of which several devices have parts that cannot be joined."""

from collections.abc import Iterator
from typing import Any, NoReturn

from dure.errors import TaskInvalid


class NotGathered:
    """Placeholder for a value that could not be joined: any use of it raises the reason."""

    __slots__ = ("_reason",)

    def __init__(self, reason: str) -> None:
        object.__setattr__(self, "_reason", reason)

    def __getattribute__(self, name: str) -> Any:
        if name not in ("__deepcopy__", "__copy__"):
            _raise_reason(self)
        return lambda *_: self

    def __repr__(self) -> str:
        return f"<not gathered: {object.__getattribute__(self, '_reason')}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _raise_reason(next(_not_gathered((args, kwargs))))


def is_not_gathered(value: Any) -> bool:
    """Return whether a value is a `NotGathered`, without using it."""
    return type(value) is NotGathered


def _not_gathered(value: Any) -> Iterator[NotGathered]:
    if is_not_gathered(value):
        yield value
    elif type(value) in (tuple, list):
        for item in value:
            yield from _not_gathered(item)
    elif type(value) is dict:
        yield from _not_gathered(list(value.values()))


def _raise_reason(value: NotGathered, *_: Any, **__: Any) -> NoReturn:
    raise TaskInvalid(object.__getattribute__(value, "_reason"))


_OPERATORS = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor", "lshift"),
    *("rshift", "neg", "pos", "abs", "invert"),
)
_OTHERS = (
    *("lt", "le", "eq", "ne", "gt", "ge", "bool", "int", "float", "complex", "index", "len", "iter", "next", "call"),
    *("getitem", "setitem", "delitem", "contains", "hash", "format", "str", "array", "enter", "setattr", "reversed"),
)
# operators are looked up in the class, not with `__getattribute__`
for _name in (*_OPERATORS, *(f"r{operator}" for operator in _OPERATORS), *_OTHERS):
    setattr(NotGathered, f"__{_name}__", _raise_reason)
