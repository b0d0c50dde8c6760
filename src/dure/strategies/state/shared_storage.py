"""Detection of tensors that share memory."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dure.strategies.state.objects.object_state import ObjectState


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage may share elements, that is, whether their byte ranges overlap."""
    spans = [_span(tensor) for tensor in (one, other) if tensor.numel()]
    return len(spans) == 2 and spans[0].start < spans[1].stop and spans[1].start < spans[0].stop


def has_own_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has elements in memory itself, unlike one that wraps others, such as a quantised one."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


def _span(held: "Tensor | np.ndarray[Any, Any]") -> range:
    """Return the addresses of the bytes from the first to the last element."""
    if isinstance(held, np.ndarray):
        begin, size, strides = held.__array_interface__["data"][0], held.itemsize, held.strides
    else:
        size = held.element_size()
        begin = held.untyped_storage().data_ptr() + held.storage_offset() * size
        strides = tuple(stride * size for stride in held.stride())
    ends = [(length - 1) * stride for length, stride in zip(held.shape, strides, strict=True)]
    return range(begin + sum(end for end in ends if end < 0), begin + sum(end for end in ends if end > 0) + size)


def sharing_memory(model: nn.Module, objects: Mapping[str, object]) -> list[str]:
    """Return the names of parameters that share memory, and of the tensors and arrays with which they share it.

    A parameter that is registered under several names is one object and does not count.

    Args:
        model: Model whose parameters and buffers are compared.
        objects: Objects of the task by name, which may hold further tensors, such as `parameter.data`, and arrays of
            NumPy, such as the one of which a parameter was made.
    """
    spans = [(_span(held), name, held) for name, held in _with_memory(model, objects)]
    found: dict[str, None] = {}
    before: list[tuple[range, str, Any]] = []
    """Those that begin earlier and may not have ended."""
    for span, name, held in sorted(spans, key=lambda each: each[0].start):
        before = [each for each in before if each[0].stop > span.start]
        for _, other_name, other in before:
            if held is not other and (isinstance(held, nn.Parameter) or isinstance(other, nn.Parameter)):
                found |= {name: None, other_name: None}
        before.append((span, name, held))
    return [name for _, name, _ in spans if name in found]


def _with_memory(model: nn.Module, objects: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and arrays that have elements in the memory of the host or of a device, with their names."""
    for name, held in _tensors_and_arrays(model, objects):
        if isinstance(held, np.ndarray):
            if held.size:
                yield name, held
        elif held.layout == torch.strided and held.numel() and not held.is_meta and has_own_memory(held):
            yield name, held


def _tensors_and_arrays(model: nn.Module, objects: Mapping[str, object]) -> Iterator[tuple[str, Any]]:
    own = [*model.named_parameters(), *model.named_buffers()]
    yield from own
    known = {id(tensor) for _, tensor in own}
    # until the first forward pass, torch's old spectral_norm has the memory of the weight that it divides
    recomputed = recomputed_weights(model)
    for path, held in ObjectState({**objects, "model": model}).first.items():
        if isinstance(held, Tensor | np.ndarray) and id(held) not in known and path not in recomputed:
            yield path, held


def recomputed_weights(model: nn.Module) -> set[str]:
    """Return the paths of weights that each forward pass computes from others (torch.nn.utils: norms, pruning)."""
    found = set()
    for path, module in model.named_modules():
        where = f"model.{path}." if path else "model."
        own = {name for name, _ in module.named_parameters(recurse=False)}
        for name in own:
            base, _, ending = name.rpartition("_")
            if ending in ("orig", "g") and base and base not in own:
                found.add(f"{where}{base}")
    return found
