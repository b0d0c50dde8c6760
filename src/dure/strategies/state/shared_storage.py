"""Detection of tensors that share memory."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from dure.strategies.state.objects.object_state import ObjectState


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one storage may share elements, that is, whether their byte ranges overlap."""
    spans = [_span(tensor) for tensor in (one, other) if tensor.numel()]
    return len(spans) == 2 and spans[0].start < spans[1].stop and spans[1].start < spans[0].stop


def _span(tensor: Tensor) -> range:
    size = tensor.element_size()
    begin = tensor.storage_offset() * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return range(begin, begin + (last + 1) * size)


def sharing_memory(model: nn.Module, objects: Mapping[str, object]) -> list[str]:
    """Return the names of parameters that share memory, and of the tensors with which they share it.

    A parameter that is registered under several names is one object and does not count.

    Args:
        model: Model whose parameters and buffers are compared.
        objects: Objects of the task by name, which may hold further tensors, such as `parameter.data`.
    """
    of_storage: dict[int, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in _tensors(model, objects):
        if tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta:
            of_storage[tensor.untyped_storage().data_ptr()].append((name, tensor))
    found: dict[str, None] = {}
    for tensors in of_storage.values():
        parameters = [pair for pair in tensors if isinstance(pair[1], nn.Parameter)]
        for name, one in parameters:
            for other_name, other in tensors:
                if one is not other and overlap(one, other):
                    found |= {name: None, other_name: None}
    return [*found]


def _tensors(model: nn.Module, objects: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
    own = [*model.named_parameters(), *model.named_buffers()]
    yield from own
    known = {id(tensor) for _, tensor in own}
    # until the first forward pass, torch's old spectral_norm has the memory of the weight that it divides
    recomputed = recomputed_weights(model)
    for path, held in ObjectState({**objects, "model": model}).first.items():
        if isinstance(held, Tensor) and id(held) not in known and path not in recomputed:
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
