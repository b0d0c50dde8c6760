"""Places of plain state: functions that see that a value has changed, and bring back what it was."""

import copy
import ctypes
import itertools
import operator
import random
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from multiprocessing.sharedctypes import SynchronizedBase
from queue import Queue
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.measure.checksum import checksum
from dure.strategies.generator_state import GENERATORS, generator_state, set_generator_state
from dure.strategies.namespaces import ATOMS
from dure.torchcompat import MODULE_CONTENTS

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
"""Elements of a larger one that are compared at each look."""
_MOST_SAMPLES = 256
"""Samples of a larger array that take turns: all of it, up to four million elements."""


@dataclass(slots=True, eq=False)
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
    """Names of attributes that came or went, where the place is the names of an object. The value is a dictionary by
    their paths then."""
    has_changed_anywhere: Callable[[], bool] | None = None
    """Sight of changes that `has_changed` misses, which looks at a sample; it takes time in proportion to the size."""
    holder: tuple[str, str] = ("", "")
    """Attribute that the place belongs to: `object_state.Holder`."""


DEFINITIONS = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
"""Kinds of values that are no state themselves; which one of them an attribute names is."""


def some(container: Any, most: int = _MOST_ITEMS // 10) -> Iterator[tuple[Any, Any]]:
    """Yield the items of a container, each with its place; of a long one so many, equally far apart."""
    items = container.items() if isinstance(container, Mapping) else enumerate(container)
    step = 1 if len(container) <= _MOST_ITEMS else -(-len(container) // most)
    yield from list(itertools.islice(items, 0, None, step))


def skips_state(container: Any) -> bool:
    """Return whether `some` leaves out items that may change inside."""
    if len(container) <= _MOST_ITEMS:
        return False
    items = container.values() if isinstance(container, Mapping) else container
    # all of them where that is quick
    kinds = set(map(type, itertools.islice(items, _MOST_COPIED * 10)))
    return not all(issubclass(kind, (*ATOMS, *DEFINITIONS, tuple, frozenset, np.generic)) for kind in kinds)


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
    """Return the place of a tensor's values, of its gradient, and of whether it takes one."""
    version, flag = tensor._version, tensor.requires_grad
    is_small = _has_elements(tensor) and tensor.numel() <= MOST_ELEMENTS
    values = tensor.detach().clone() if is_small else None
    sample = _sample(tensor).clone() if is_large(tensor) else None
    grad = _grad(tensor)
    grad_version, grad_values = (None, None) if grad is None else (grad._version, grad.clone())

    def has_changed() -> bool:
        now = _grad(tensor)
        if tensor.requires_grad is not flag or now is not grad or (now is not None and now._version != grad_version):
            return True
        if values is None:
            # a change through `.data` has no version
            return bool(tensor._version != version) or not (sample is None or torch.equal(_sample(tensor), sample))
        return not torch.equal(_bits(tensor), _bits(values))

    def put_back() -> None:
        if values is not None:
            at = tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())
            tensor.detach()[at].copy_(values[at])  # expanded ones have several elements in one place
        if tensor.is_leaf:
            tensor.requires_grad_(flag)
            tensor.grad = None if grad is None or grad_values is None else grad.copy_(grad_values)

    def value() -> Any:
        return comparable(tensor), tensor.requires_grad, comparable(_grad(tensor))

    return Place(path, has_changed, put_back, value, is_put_back=is_small)


def _grad(tensor: Tensor) -> Tensor | None:
    return tensor.grad if tensor.is_leaf else None


class _Samples:
    """Samples of a large array: one is compared at each look, and all of them ever more seldom."""

    def __init__(self, values: Any) -> None:
        """Note all of them, by digests."""
        self._flat, self._stride = values.flat, _stride_of(values.size)
        number = 1 if isinstance(values, np.memmap) else min(self._stride, _MOST_SAMPLES)
        self._digests = [self._digest(each) for each in range(number)]
        self._next = 0
        self._num_looks = 0

    def _digest(self, number: int) -> int:
        return hash(self._flat[number :: self._stride].tobytes())

    def is_one_other(self) -> bool:
        """Return whether the next sample is no longer as it was; stay at one that is not."""
        self._num_looks += 1
        if self._num_looks & (self._num_looks - 1) == 0:
            return self.is_any_other()
        if self._digest(self._next) != self._digests[self._next]:
            return True
        self._next = (self._next + 1) % len(self._digests)
        return False

    def is_any_other(self) -> bool:
        """Return whether any sample is no longer as it was."""
        others = (n for n, digest in enumerate(self._digests) if self._digest(n) != digest)
        found = next(others, None)
        self._next = self._next if found is None else found
        return found is not None


def _sample(tensor: Tensor) -> Tensor:
    """Return some elements of a tensor as bytes, equally far apart."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[:1].reshape(-1)[:_MOST_SAMPLED]
    return _bits(flat[:: _stride_of(flat.numel())])


def _stride_of(size: int) -> int:
    return size // _MOST_SAMPLED | 1


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes: NaN is equal to itself."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def parts_place(path: str, modules: Sequence[nn.Module]) -> Place:
    """Return the place of what modules are made of, and of their modes."""
    registers = [register for module in modules for register in MODULE_CONTENTS(module)[:3]]
    before = [dict(register) for register in registers]
    parts = [*itertools.chain.from_iterable(map(_ITEMS, registers))]
    modes = [module.training for module in modules]

    def has_changed() -> bool:
        if [*map(_MODE, modules)] != modes:
            return True
        now = [*itertools.chain.from_iterable(map(_ITEMS, registers))]
        return len(now) != len(parts) or any(a is not b or x != y for (x, a), (y, b) in zip(now, parts, strict=True))

    def put_back() -> None:
        for register, entries in zip(registers, before, strict=True):
            register.clear()
            register.update(entries)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode

    def value() -> Any:
        return [*map(_MODE, modules)], [
            (name, comparable(part)) for register in registers for name, part in register.items()
        ]

    return Place(path, has_changed, put_back, value)


_MODE = operator.attrgetter("training")
_ITEMS = dict.items


def array_place(path: str, values: Any) -> Place:
    """Return the place of an array's values."""
    is_small = values.dtype != object and values.size <= MOST_ELEMENTS
    if not is_small and values.dtype != object:
        samples = _Samples(values)
        return Place(
            path,
            samples.is_one_other,
            lambda: None,
            lambda: comparable(values),
            is_put_back=False,
            has_changed_anywhere=samples.is_any_other,
        )

    def looked_at() -> Any:
        return values if is_small else values.flat[:: _stride_of(values.size)]

    before = looked_at().copy()

    def has_changed() -> bool:
        now = looked_at()
        return not _are_same_items([*now], [*before]) if values.dtype == object else now.tobytes() != before.tobytes()

    def put_back() -> None:
        if is_small:
            np.copyto(values, before)

    return Place(path, has_changed, put_back, lambda: comparable(values), is_put_back=is_small)


def memory_of(value: Any) -> "memoryview | None":
    """Return the memory of a number or an array of `ctypes`, shared between processes or not; None of anything else."""
    inner = value.get_obj() if isinstance(value, SynchronizedBase) else value
    return memoryview(inner).cast("B") if isinstance(inner, ctypes.Array | ctypes._SimpleCData) else None


def is_shared(value: Any) -> bool:
    """Return whether other processes may have the memory of a number or an array of `ctypes` too."""
    return isinstance(value, SynchronizedBase) or hasattr(value, "_wrapper")


def memory_place(path: str, memory: memoryview) -> Place:
    """Return the place of memory that `ctypes` reads."""
    before = bytes(memory)
    return Place(path, lambda: memory != before, lambda: memory.__setitem__(slice(None), before), lambda: bytes(memory))


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
