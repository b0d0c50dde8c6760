"""Places of plain state: functions that detect that a value has changed, and restore it."""

import copy
import ctypes
import functools
import gc
import itertools
import operator
import random
import threading
import types
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from queue import Queue
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.strategies.state.checksum import checksum
from dure.strategies.state.objects.generator_state import GENERATORS, generator_state, set_generator_state
from dure.strategies.state.objects.namespaces import ATOMS, is_users
from dure.torchcompat.tensors import bytes_of

_MOST_ITEMS = 1_000
"""Maximum number of items searched in a container. In a longer one a tenth as many are searched, and in a very long one
so many are compared: it is most likely data.
"""
_MOST_COPIED = 10_000
"""Maximum number of items of a container of which all are compared and restored."""
_MOST_COMPARED = 1 << 16
"""Maximum number of elements of a tensor or array whose values are compared between two points in time."""


@dataclass(slots=True, eq=False)
class Place:
    """Place that may change, with functions that detect the change and undo it."""

    path: str
    has_changed: Callable[[], bool | int]
    put_back: Callable[[], None]
    value: Callable[[], Any] = lambda: None
    """Function that returns the current content, for comparison with that at another time."""
    is_generator: bool = False
    is_put_back: bool = True
    """True if the change can be undone."""
    is_derived: bool = False
    """True if the place only holds values that would be computed again, as a cache does."""
    names: Callable[[], Iterable[str]] | None = None
    """Function that returns the names of added and removed attributes, if the place is the set of an object's names.
    The value is then a dictionary by their paths.
    """
    has_changed_anywhere: Callable[[], bool] | None = None
    """Function that detects changes missed by `has_changed`, which reads a sample. Its time is proportional to the
    size.
    """
    holder: tuple[str, str] = ("", "")
    """Attribute to which the place belongs: `object_state.Holder`."""


DEFINITIONS = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
"""Kinds of values that are no state themselves, whereas an attribute's reference to one of them is."""


def some(container: Any, most: int = _MOST_ITEMS // 10) -> Iterator[tuple[Any, Any]]:
    """Yield the items of a container, each with its position; of a long one `most`, equally spaced."""
    items = container.items() if isinstance(container, Mapping) else enumerate(container)
    step = 1 if len(container) <= _MOST_ITEMS else -(-len(container) // most)
    yield from list(itertools.islice(items, 0, None, step))


def skips_state(container: Any) -> bool:
    """Return whether `some` omits items that may change internally."""
    if len(container) <= _MOST_ITEMS:
        return False
    items = container.values() if isinstance(container, Mapping) else container
    # all of them if that is quick
    kinds = set(map(type, itertools.islice(items, _MOST_COPIED * 10)))
    return not all(issubclass(kind, (*ATOMS, *DEFINITIONS, tuple, frozenset, np.generic)) for kind in kinds)


def container_place(path: str, container: Any) -> Place:
    """Return the place of a list, a deque, a set or a mapping: the items that it contains."""
    if len(container) > _MOST_COPIED:
        return _long_place(path, container)
    before = copy.copy(container)
    is_extended = isinstance(container, list | deque)

    def put_back() -> None:
        container.clear()
        (container.extend if is_extended else container.update)(before)

    return Place(path, lambda: not are_same_items(before, container), put_back, lambda: comparable(container))


def attribute_place(path: str, owner: Any, name: str, before: Any) -> Place:
    """Return the place of an attribute: the value to which it refers."""
    missing = object()

    def has_changed() -> bool:
        return not _is_same(vars(owner).get(name, missing), before)

    return Place(
        path, has_changed, lambda: vars(owner).__setitem__(name, before), lambda: comparable(vars(owner).get(name))
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Incomparable:
    """Value of which only the identity is known: another object counts as a change that depends on the samples."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Incomparable) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        """Return the class alone, because addresses differ between processes."""
        return f"<{type(self.value).__qualname__}>"


def comparable(value: Any, depth: int = 4) -> Any:
    """Return a value that is equal for similar values, a few levels deep into containers."""
    if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_meta:
        shown = [str(value.dtype), tuple(value.shape)]
        return [*shown, bytes_of(value).tolist() if value.numel() <= _MOST_COMPARED else checksum([value])]
    if isinstance(value, ATOMS):
        return repr(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        return [str(value.dtype), np.shape(value), value.tobytes()]
    if isinstance(value, DEFINITIONS):
        return value.__qualname__
    if depth and isinstance(value, nn.Module):  # a copy of the model that the loss makes, say
        tensors = itertools.chain(value.named_parameters(), value.named_buffers())
        return [type(value).__qualname__, value.training, [(name, comparable(each, 0)) for name, each in tensors]]
    if isinstance(value, array | bytearray | memoryview | ctypes.Array | ctypes._SimpleCData):
        return [type(value).__qualname__, _bytes_of_memory(value)]
    if depth and isinstance(value, Mapping):
        return [(comparable(key, 0), comparable(item, depth - 1)) for key, item in value.items()]
    if depth and isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if depth and isinstance(value, list | tuple | deque):
        return [comparable(item, depth - 1) for item in value]
    return _Incomparable(value)


def _bytes_of_memory(value: Any) -> object:
    """Return a copy of the bytes of a value that gives access to its memory, or a checksum of many."""
    try:
        found = memoryview(value).tobytes()
    except (TypeError, ValueError, BufferError):  # it was released, or holds references
        return type(value).__qualname__
    return found if len(found) <= _MOST_COMPARED else zlib.crc32(found)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if not isinstance(one, (*ATOMS, types.MethodType)) or type(one) is not type(other):
        return False
    return bool(one == other or (one != one and other != other))  # NaN equals NaN here


def are_same_items(one: Any, other: Any) -> bool:
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


def cache_place(path: str, function: "functools._lru_cache_wrapper[Any]") -> Place:
    """Return the place of the values cached by `functools.cache` or `lru_cache`.

    An `lru_cache` with a bound can only be emptied; earlier values stay in it.
    """
    cached = None
    if function.cache_parameters()["maxsize"] is None:
        # C holds it; the only other dictionary is that of the attributes
        held = [one for one in gc.get_referents(function) if type(one) is dict and one is not vars(function)]
        cached = held[0] if len(held) == 1 else None
    before = None if cached is None else dict(cached)
    size = function.cache_info().currsize

    def has_changed() -> bool:
        return function.cache_info().currsize != size

    def put_back() -> None:
        if cached is not None and before is not None:
            cached.clear()
            cached.update(before)
        elif not size:
            function.cache_clear()

    return Place(path, has_changed, put_back, is_put_back=cached is not None or not size, is_derived=True)


def queue_place(path: str, waiting: "Queue[Any]") -> Place:
    """Return the place of a queue: changes are detected only, because a thread may be filling it."""
    before = list(waiting.queue)
    return Place(
        path,
        lambda: not are_same_items(list(waiting.queue), before),
        lambda: None,
        lambda: comparable(list(waiting.queue)),
        is_put_back=False,
    )


def stream_place(path: str, stream: Any) -> Place:
    """Return the place of an `io.BytesIO` or `io.StringIO`: its content and its position."""

    def now() -> Any:
        return None if stream.closed else stream.__getstate__()

    before = now()

    def put_back() -> None:
        with suppress(BufferError, ValueError):  # a view of its memory is in use, or it was closed
            stream.__setstate__(before)

    return Place(path, lambda: now() != before, put_back, now, is_put_back=before is not None)


def file_place(path: str, file: Any) -> Place:
    """Return the place of an open file's position; one that is written, or has no positions, never changes."""

    def now() -> int | None:
        with suppress(OSError, ValueError):  # it was closed, or a loop over its lines has begun
            return int(file.tell())
        with suppress(OSError, ValueError, AttributeError):
            return int(file.buffer.tell())
        return None

    before = now() if not file.closed and file.readable() and not file.writable() and file.seekable() else None

    def put_back() -> None:
        with suppress(OSError, ValueError):
            file.seek(before)

    return Place(path, lambda: before is not None and now() not in (before, None), put_back, now)


def event_place(path: str, event: threading.Event) -> Place:
    """Return the place of an event's flag: only detected if a thread of the task may be the one that sets it."""
    before = event.is_set()
    is_put_back = not _have_users_threads()

    def put_back() -> None:
        if is_put_back:
            (event.set if before else event.clear)()

    return Place(path, lambda: event.is_set() != before, put_back, event.is_set, is_put_back=is_put_back)


def _have_users_threads() -> bool:
    """Return whether threads run other than Python's main thread and those of dure and of libraries."""
    for thread in threading.enumerate():
        target = getattr(thread, "_target", None)
        kinds = (type(thread), getattr(target, "__func__", target))
        if any(kind is not None and (is_users(kind) or _is_of_pool(kind)) for kind in kinds):
            return True
    return False


def _is_of_pool(function: Any) -> bool:
    return bool(getattr(function, "__module__", "") == "concurrent.futures.thread")


def variable_place(path: str, variable: ContextVar[Any]) -> Place:
    """Return the place of a context variable. A variable without a value cannot be restored to that."""
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
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bytes_of(one), bytes_of(other))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(_is_equal_state(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_equal_state, one, other))
    return _is_same(one, other)


def generator_place(path: str, value: Any) -> Place | None:
    """Return the place of a random number generator; None if the value is not one."""
    if not isinstance(value, GENERATORS) or isinstance(value, random.SystemRandom):
        return None  # the system's generator has no state
    before = generator_state(value)
    return Place(
        path,
        lambda: bool(generator_state(value) != before),
        lambda: set_generator_state(value, before),
        is_generator=True,
    )


def key_text(key: object) -> str:
    """Return a key as shown in paths."""
    try:
        return repr(key)
    except Exception:
        return object.__repr__(key)  # the class's own `__repr__` fails
