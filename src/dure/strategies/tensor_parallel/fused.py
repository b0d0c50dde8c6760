"""Queries, keys and values that one layer returns together, divided by heads.

The rank's part has its heads' queries, then keys, then values. DTensor treats it as a part of the last dimension, which
is wrong until it is cut into three.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dure.errors import TaskInvalid
from dure.strategies.contract.batches import map_tensors
from dure.strategies.state.tensor_shard import version_of
from dure.strategies.tensor_parallel.boundary import from_local, gathered, mark_as_copy, released, to_local
from dure.strategies.tensor_parallel.plan import OPTION


def as_fused(local: Tensor, mesh: DeviceMesh) -> Tensor:
    """Mark a rank's part `(..., 3 width / ranks)` of concatenated queries, keys and values.

    DTensor treats it as a part of the last dimension, which is wrong: only `DividedValues` may handle it.
    """
    value = from_local(local, mesh, Shard(local.dim() - 1))
    value.is_fused = True
    value.handed_out = []
    return value  # type: ignore[no-any-return]


def is_fused(value: Any) -> bool:
    """Return whether a value came from `as_fused`."""
    return getattr(value, "is_fused", False) is True and isinstance(value, DTensor)


def check_is_unchanged(value: Any) -> None:
    """Refuse further use after a part was changed in place, which the gradient would not take into account.

    Raises:
        TaskInvalid: The part was changed.
    """
    if any(version_of(part) != version for part, version in value.handed_out):
        raise TaskInvalid(
            "the model uses queries, keys and values of one layer again after it changed one of them in place: change "
            f"a copy of it, or make the layer gathered with {OPTION}"
        )


def whole_of_fused(value: Any) -> Tensor:
    """Return queries, keys and values of all heads `(..., 3 width)`, in the order of one device.

    Communication: one all_gather.
    """
    check_is_unchanged(value)
    apart = to_local(value).unflatten(-1, (3, -1))
    return released(from_local(apart, value.device_mesh, Shard(apart.dim() - 1))).flatten(-2)


def on_fused(func: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Cut the value into three, by any function that does so; compute anything else with the whole."""
    check_is_unchanged(value)
    if func in _VIEWS and not kwargs:
        shape = args[0] if args and isinstance(args[0], Sequence) else args
        if (found := _viewed(value, tuple(shape))) is not None:
            return found
    if func in _CUTS and _cuts_in_three(func, value, *args, **kwargs):
        thirds = to_local(value).chunk(3, -1)
        parts = [from_local(third, value.device_mesh, Shard(value.dim() - 1)) for third in thirds]
        value.handed_out += [(part, version_of(part)) for part in parts]
        return tuple(parts)
    others, named = map_tensors((args, kwargs), lambda one: gathered(one) if isinstance(one, DTensor) else one)
    return func(mark_as_copy(whole_of_fused(value), value), *others, **named)


def _viewed(value: Any, shape: tuple[int, ...]) -> Tensor | None:
    """Return a view as `(..., 3, heads, size)` or `(..., 3, width)`; None for any other shape."""
    known = math.prod(size for size in shape if size != -1)
    shape = tuple(value.numel() // known if size == -1 else size for size in shape)
    width, num_ranks = value.size(-1) // 3, value.device_mesh.size()
    for divided in (len(shape) - 2, len(shape) - 1):
        is_cut = divided > 0 and shape[divided - 1] == 3 and math.prod(shape[divided:]) == width
        if is_cut and shape[divided] % num_ranks == 0:
            local = to_local(value).view(*shape[:divided], shape[divided] // num_ranks, *shape[divided + 1 :])
            viewed: Tensor = from_local(local, value.device_mesh, Shard(divided))
            value.handed_out.append((viewed, version_of(viewed)))
            return viewed
    return None


def _cuts_in_three(func: Any, value: Any, size: Any = None, dim: int = 0, **kwargs: Any) -> bool:
    if dim not in (-1, value.dim() - 1):
        return False
    width = value.size(-1) // 3
    return size == 3 if func in _CHUNKS else size in (width, [width] * 3, (width,) * 3)


_VIEWS = (Tensor.view, Tensor.reshape, torch.reshape)
_CHUNKS = (Tensor.chunk, torch.chunk)
_CUTS = (*_CHUNKS, Tensor.split, torch.split)

_GETTERS: tuple[Any, ...] = (
    *(Tensor.shape, Tensor.dtype, Tensor.device, Tensor.requires_grad, Tensor.ndim, Tensor.grad_fn, Tensor.is_leaf),
    *(Tensor.layout, Tensor.is_sparse, Tensor.is_nested, Tensor.is_quantized),
)

_OF_ALL = {
    *(getter.__get__ for getter in _GETTERS),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.__hash__, Tensor.__repr__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.requires_grad_),
}

OF_GRADIENT = frozenset({Tensor.register_hook, Tensor.retain_grad})
"""Functions through which a model gets the gradient, which has the order of the parts."""


def may_be_asked(func: Any) -> bool:
    """Return whether the result of a function does not depend on the order inside the value."""
    return func in _OF_ALL
