"""Places of plain state: functions that see that a value has changed, and bring back what it was."""

import copy
import itertools
import operator
import random
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from queue import Queue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from dure.measure.checksum import checksum
from dure.strategies.generator_state import GENERATORS, generator_state, set_generator_state
from dure.strategies.namespaces import ATOMS

_MOST_ITEMS = 1_000
"""Items of a container that are looked into. Of a longer one a tenth of as many is, and of a very long one so many are
compared: it is most likely data."""
_MOST_COPIED = 10_000
"""Items of a container that are all compared and put back."""
_MOST_COMPARED = 1 << 16
"""Elements of a tensor or array whose values are compared between two moments."""
MOST_ELEMENTS = 1 << 20
"""Elements of a tensor or array, and bytes of a buffer, that are all compared and put back."""
_MOST_SAMPLED = 1 << 14
"""Elements of a larger one that are compared."""


@dataclass(frozen=True, slots=True)
class Place:
    """Place that may change, with functions that see the change and undo it."""

    path: str
    has_changed: Callable[[], bool]
    put_back: Callable[[], None]
    value: Callable[[], Any] = lambda: None
    """Content at this moment, to be compared with that of another moment."""
    is_generator: bool = False
    is_put_back: bool = True
    """Whether the change can be undone."""
    names: Callable[[], Iterable[str]] | None = None
    """Paths of attributes that came or went, where the place is the names of an object. The value is a dictionary of
    them then."""


DEFINITIONS = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
"""Kinds of values that are no state themselves; which one of them an attribute names is."""


def some(container: Any, most: int = _MOST_ITEMS // 10) -> Iterator[tuple[Any, Any]]:
    """Yield the items of a container, each with its place; of a long one so many, equally far apart."""
    items = container.items() if isinstance(container, Mapping) else enumerate(container)
    step = 1 if len(container) <= _MOST_ITEMS else -(-len(container) // most)
    yield from list(itertools.islice(items, 0, None, step))


def container_place(path: str, container: Any) -> Place:
    """Return the place of a list, a deque, a set or a mapping: which items it has."""
    if len(container) > _MOST_COPIED:
        return _long_place(path, container)
    before = copy.copy(container)
    is_extended = isinstance(container, list | deque)

    def put_back() -> None:
        container.clear()
        (container.extend if is_extended else container.update)(before)

    return Place(path, lambda: not _are_same_items(before, container), put_back, lambda: comparable(container))


def attribute_place(path: str, owner: Any, name: str, before: Any) -> Place:
    """Return the place of an attribute: which value it names."""
    missing = object()

    def has_changed() -> bool:
        return not _is_same(vars(owner).get(name, missing), before)

    return Place(
        path, has_changed, lambda: vars(owner).__setitem__(name, before), lambda: comparable(vars(owner).get(name))
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Incomparable:
    """Value of which nothing can be told but which object it is: another one counts as changed by the samples."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Incomparable) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def comparable(value: Any, depth: int = 4) -> Any:
    """Return something that is equal for values that are alike, a few levels deep into containers."""
    if isinstance(value, Tensor) and type(value) is Tensor and value.layout == torch.strided and not value.is_meta:
        shown = [str(value.dtype), tuple(value.shape)]
        return [*shown, _bits(value).tolist() if value.numel() <= _MOST_COMPARED else checksum([value])]
    if isinstance(value, ATOMS):
        return repr(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        return [str(value.dtype), np.shape(value), value.tobytes()]
    if isinstance(value, DEFINITIONS):
        return value.__qualname__
    if depth and isinstance(value, Mapping):
        return [(comparable(key, 0), comparable(item, depth - 1)) for key, item in value.items()]
    if depth and isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if depth and isinstance(value, list | tuple | deque):
        return [comparable(item, depth - 1) for item in value]
    return _Incomparable(value)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if not isinstance(one, (*ATOMS, types.MethodType)) or type(one) is not type(other):
        return False
    return bool(one == other or (one != one and other != other))  # NaN is the same as itself here


def _are_same_items(one: Any, other: Any) -> bool:
    if len(one) != len(other):
        return False
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, set):
        return bool(one == other)
    return all(map(operator.is_, one, other)) or all(map(_is_same, one, other))


def _long_place(path: str, container: Any) -> Place:
    """Return the place of a container that is too long to be compared item by item."""
    length, chosen = len(container), list(some(container, _MOST_ITEMS))

    def has_changed() -> bool:
        if len(container) != length:
            return True
        if isinstance(container, Mapping):
            return not all(key in container and _is_same(container[key], item) for key, item in chosen)
        if isinstance(container, set):
            return not all(item in container for _, item in chosen)
        return not all(_is_same(container[place], item) for place, item in chosen)

    def shorten() -> None:
        if isinstance(container, list):
            del container[length:]  # logs and histories grow at their end

    return Place(path, has_changed, shorten, lambda: (len(container), comparable(chosen)), is_put_back=False)


def is_large(tensor: Tensor) -> bool:
    """Return whether of a tensor no copy is kept, so that whoever changes it undoes that."""
    return tensor.numel() > MOST_ELEMENTS and _has_elements(tensor)


def _has_elements(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta


def tensor_place(path: str, tensor: Tensor) -> Place:
    """Return the place of a tensor's values."""
    version = tensor._version
    is_small = _has_elements(tensor) and tensor.numel() <= MOST_ELEMENTS
    values = tensor.detach().clone() if is_small else None
    sample = _sample(tensor).clone() if is_large(tensor) else None

    def has_changed() -> bool:
        if values is None:
            # a change through `.data` has no version
            return bool(tensor._version != version) or not (sample is None or torch.equal(_sample(tensor), sample))
        return not torch.equal(_bits(tensor), _bits(values))

    def put_back() -> None:
        if values is not None:
            at = tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())
            tensor.detach()[at].copy_(values[at])  # expanded ones have several elements in one place

    return Place(path, has_changed, put_back, lambda: comparable(tensor), is_put_back=is_small)


def _sample(tensor: Tensor) -> Tensor:
    """Return some elements of a tensor as bytes, equally far apart."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[:1].reshape(-1)[:_MOST_SAMPLED]
    return _bits(flat[:: flat.numel() // _MOST_SAMPLED | 1])


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes: NaN is equal to itself."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def array_place(path: str, values: Any) -> Place:
    """Return the place of an array's values."""
    is_small = values.dtype != object and values.size <= MOST_ELEMENTS

    def looked_at() -> Any:
        return values if is_small else values.flat[:: values.size // _MOST_SAMPLED | 1]

    before = looked_at().copy()

    def has_changed() -> bool:
        now = looked_at()
        return not _are_same_items([*now], [*before]) if values.dtype == object else now.tobytes() != before.tobytes()

    def put_back() -> None:
        if is_small:
            np.copyto(values, before)

    return Place(path, has_changed, put_back, lambda: comparable(values), is_put_back=is_small)


def bytes_place(path: str, buffer: "bytearray | array[Any]") -> Place:
    """Return the place of a `bytearray` or an `array.array`."""
    length, is_small = len(buffer), len(buffer) <= MOST_ELEMENTS
    step = 1 if is_small else length // _MOST_SAMPLED | 1
    before = buffer[::step]

    def put_back() -> None:
        if is_small:
            buffer[:] = before  # type: ignore[assignment]

    return Place(
        path,
        lambda: len(buffer) != length or buffer[::step] != before,
        put_back,
        lambda: bytes(buffer[::step]),
        is_put_back=is_small,
    )


def queue_place(path: str, waiting: "Queue[Any]") -> Place:
    """Return the place of a queue: seen only, for a thread that fills it would not know what was put back."""
    before = list(waiting.queue)
    return Place(
        path,
        lambda: not _are_same_items(list(waiting.queue), before),
        lambda: None,
        lambda: comparable(list(waiting.queue)),
        is_put_back=False,
    )


def variable_place(path: str, variable: ContextVar[Any]) -> Place:
    """Return the place of a context variable. One without a value cannot be brought back to that."""
    unset = object()

    def now() -> Any:
        try:
            return variable.get()
        except LookupError:
            return unset

    before = now()

    def put_back() -> None:
        if before is not unset:
            variable.set(before)

    return Place(
        path,
        lambda: not _is_same(now(), before),
        put_back,
        lambda: comparable(now()),
        is_put_back=before is not unset,
    )


def optimizer_place(path: str, optimizer: Optimizer) -> Place:
    """Return the place of an optimiser's state."""
    before = copy.deepcopy(optimizer.state_dict())

    def put_back() -> None:
        optimizer.load_state_dict(copy.deepcopy(before))

    return Place(path, lambda: not _is_equal_state(optimizer.state_dict(), before), put_back)


def _is_equal_state(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits(one), _bits(other))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(_is_equal_state(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_equal_state, one, other))
    return _is_same(one, other)


def generator_place(path: str, value: Any) -> Place | None:
    """Return the place of a generator of random numbers; None if it is none."""
    if not isinstance(value, GENERATORS) or isinstance(value, random.SystemRandom):
        return None  # the system's own has no state
    before = copy.deepcopy(generator_state(value))

    def has_changed() -> bool:
        return repr(generator_state(value)) != repr(before)

    return Place(path, has_changed, lambda: set_generator_state(value, before), is_generator=True)


def key_text(key: object) -> str:
    """Return a key as paths show it."""
    try:
        return repr(key)
    except Exception:
        return object.__repr__(key)  # of a class whose own fails
