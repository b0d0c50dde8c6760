"""Tensors that have memory in common."""

import itertools
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage may have elements in common: whether the spans of their bytes meet."""
    spans = [_span(tensor) for tensor in (one, other) if tensor.numel()]
    return len(spans) == 2 and spans[0].start < spans[1].stop and spans[1].start < spans[0].stop


def _span(tensor: Tensor) -> range:
    size = tensor.element_size()
    begin = tensor.storage_offset() * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(begin, begin + (last + 1) * size)


def sharing_memory(model: nn.Module) -> list[str]:
    """Return the names of parameters that share memory with another parameter or a buffer of a model.

    A parameter that is registered under several names is one object and not meant.
    """
    of_storage: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in _all_tensors(model):
        if tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta:
            of_storage[tensor.untyped_storage().data_ptr()].append((name, tensor))
    found: dict[str, None] = {}
    for tensors in of_storage.values():
        for (name, one), (other_name, other) in itertools.combinations(tensors, 2):
            if isinstance(one, nn.Parameter) and overlap(one, other):
                found |= {name: None, other_name: None}
    return [*found]


def _all_tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
