"""Places of the values of tensors, arrays and buffers, and of the members of modules."""

import ctypes
import itertools
import operator
from array import array
from collections.abc import Sequence
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dure.strategies.state.objects.state_places import Place, are_same_items, comparable
from dure.strategies.state.tensor_shard import version_of
from dure.torchcompat.modules import MODULE_CONTENTS
from dure.torchcompat.tensors import bytes_of, local_tensor

MOST_ELEMENTS = 1 << 20
"""Maximum elements of a tensor or array, or bytes of a buffer, of which all are compared and restored."""
_MOST_SAMPLED = 1 << 14
"""Elements of a larger one that are compared at a time."""
_MOST_SAMPLES = 256
"""Number of samples of a larger array that are compared in turn: all of it, up to four million elements."""


def is_large(tensor: Tensor) -> bool:
    """Return whether a tensor is so large that no copy is kept, and code that changes it must undo that."""
    return tensor.numel() > MOST_ELEMENTS and _has_elements(tensor)


def _has_elements(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta


def tensor_place(path: str, tensor: Tensor, *, is_most_often_constant: bool = False) -> Place:
    """Return the place of a tensor's values, of its gradient, and of whether it requires one.

    Args:
        path: Path of the tensor.
        tensor: Tensor to watch.
        is_most_often_constant: Whether only a few of many elements are compared, because the tensor is most likely a
            table.
    """
    version, flag = version_of(tensor), tensor.requires_grad
    most, sampled = (
        (_MOST_SAMPLED >> 4, _MOST_SAMPLED >> 4) if is_most_often_constant else (MOST_ELEMENTS, _MOST_SAMPLED)
    )
    is_small = _has_elements(tensor) and tensor.numel() <= most
    values = tensor.detach().clone() if is_small else None
    sample = _sample(tensor, sampled).clone() if _has_elements(tensor) and not is_small else None
    grad = _grad(tensor)
    grad_version, grad_values = (None, None) if grad is None else (version_of(grad), grad.clone())

    def has_changed() -> bool:
        now = _grad(tensor)
        if tensor.requires_grad is not flag or now is not grad or (now is not None and version_of(now) != grad_version):
            return True
        if values is None:
            # a change through `.data` does not count as a version
            return (version_of(tensor) != version) or not (
                sample is None or torch.equal(_sample(tensor, sampled), sample)
            )
        return not torch.equal(bytes_of(tensor), bytes_of(values))

    def put_back() -> None:
        if values is not None:
            restore_values(tensor, values)
        if tensor.is_leaf:
            tensor.requires_grad_(flag)
            tensor.grad = None if grad is None or grad_values is None else grad.copy_(grad_values)

    def value() -> Any:
        return comparable(tensor), tensor.requires_grad, comparable(_grad(tensor))

    return Place(path, has_changed, put_back, value, is_put_back=is_small)


def restore_values(tensor: Tensor, values: Tensor) -> None:
    """Write values to a tensor again; one that was resized, or got another dtype, gets memory like before."""
    if tensor.shape != values.shape or tensor.dtype != values.dtype:
        tensor.data = values.clone()
        return
    at = tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())
    tensor.detach()[at].copy_(values[at])  # expanded tensors have several elements in one memory location


def _grad(tensor: Tensor) -> Tensor | None:
    return tensor.grad if tensor.is_leaf else None


class _Samples:
    """Samples of a large array: one is compared each time, and all of them at growing intervals."""

    def __init__(self, values: Any) -> None:
        """Record digests of all of them."""
        self._flat, self._stride = values.flat, _stride_of(values.size)
        number = 1 if isinstance(values, np.memmap) else min(self._stride, _MOST_SAMPLES)
        self._digests = [self._digest(each) for each in range(number)]
        self._next = 0
        self._num_looks = 0

    def _digest(self, number: int) -> int:
        return hash(self._flat[number :: self._stride].tobytes())

    def is_one_other(self) -> bool:
        """Return whether the next sample has changed; a changed one is compared again next time."""
        self._num_looks += 1
        if self._num_looks & (self._num_looks - 1) == 0:
            return self.is_any_other()
        if self._digest(self._next) != self._digests[self._next]:
            return True
        self._next = (self._next + 1) % len(self._digests)
        return False

    def is_any_other(self) -> bool:
        """Return whether any sample has changed."""
        others = (n for n, digest in enumerate(self._digests) if self._digest(n) != digest)
        found = next(others, None)
        self._next = self._next if found is None else found
        return found is not None


def _sample(tensor: Tensor, most: int) -> Tensor:
    """Return some elements of a tensor as bytes, equally spaced."""
    tensor = local_tensor(tensor)
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()[:1].reshape(-1)[:most]
    return bytes_of(flat[:: _stride_of(flat.numel(), most)])


def _stride_of(size: int, most: int = _MOST_SAMPLED) -> int:
    return size // most | 1


def parts_place(path: str, modules: Sequence[nn.Module]) -> Place:
    """Return the place of the members of modules, and of their modes."""
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
        return not are_same_items([*now], [*before]) if values.dtype == object else now.tobytes() != before.tobytes()

    def put_back() -> None:
        if is_small:
            np.copyto(values, before)

    return Place(path, has_changed, put_back, lambda: comparable(values), is_put_back=is_small)


KINDS_OF_MEMORY = (ctypes.Array, ctypes._SimpleCData, ctypes.Structure, ctypes.Union)


def memory_of(value: Any) -> "memoryview | None":
    """Return the memory of a `ctypes` object, shared between processes or not; None for anything else."""
    inner = value.get_obj() if isinstance(value, SynchronizedBase) else value
    return memoryview(inner).cast("B") if isinstance(inner, KINDS_OF_MEMORY) else None


def is_shared(value: Any) -> bool:
    """Return whether other processes may also have the memory of a `ctypes` number or array."""
    return isinstance(value, SynchronizedBase) or hasattr(value, "_wrapper")


def memory_place(path: str, memory: memoryview) -> Place:
    """Return the place of memory that `ctypes` exposes."""
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
