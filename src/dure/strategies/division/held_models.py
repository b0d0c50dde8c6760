"""Models and parameters that an optimiser holds outside its groups: its step may use all of them."""

import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dure.strategies.state.objects.namespaces import ATOMS, is_users, with_dict

_MOST_OBJECTS = 2000
_MOST_LEVELS = 8
_TORCHS = frozenset(vars(torch.optim.SGD([torch.zeros(1)])))
"""Attributes that every optimiser has: groups, state and hooks, which are examined elsewhere."""


def held_model(optimizer: Optimizer) -> str | None:
    """Return the place where an optimiser, or its step, holds a module or parameters outside its groups, or None.

    Attributes are searched, and the closures of the user's own functions.
    """
    own = {name: value for name, value in vars(optimizer).items() if name not in _TORCHS}
    methods = {
        name: member
        for cls in type(optimizer).__mro__
        if is_users(cls)
        for name, member in vars(cls).items()
        if isinstance(member, types.FunctionType)
    }
    seen: dict[int, object] = {id(optimizer): optimizer}
    waiting = [(f"self.{name}", value, 0) for name, value in own.items()]
    waiting += [(f"{type(optimizer).__name__}.{name}", value, 0) for name, value in methods.items()]
    while waiting and len(seen) < _MOST_OBJECTS:
        path, value, level = waiting.pop()
        if isinstance(value, nn.Module | nn.Parameter):
            return path
        if id(value) not in seen and level < _MOST_LEVELS:
            seen[id(value)] = value
            waiting += [(f"{path}{name}", held, level + 1) for name, held in _parts(value)]
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (*ATOMS, type, types.ModuleType, torch.Tensor, Optimizer)):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield f"[{key!r}]" if isinstance(key, ATOMS) else " (a key)", key
            yield f"[{key!r}]" if isinstance(key, ATOMS) else "[...]", item
    elif isinstance(value, list | tuple | set | frozenset):
        yield from (("[...]", item) for item in value)
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
    elif isinstance(value, partial):
        yield from (("", held) for held in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, types.FunctionType):
        if is_users(value):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                with suppress(ValueError):  # the variable is not assigned yet
                    held = cell.cell_contents
                    yield "" if isinstance(held, types.FunctionType) else f"'s {name}", held
    elif (owner := with_dict(value)) is not None:
        yield from ((f".{name}", held) for name, held in vars(owner).items())
