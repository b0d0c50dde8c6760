"""Values that are divided over a tensor group between layers, and what may be done with them.

A value between a `column` layer and the `row` layer that ends the region is a DTensor: the model's own code runs on it
with the shapes that it was written for, and DTensor knows which part of it a rank has. Here is what DTensor cannot do
with such values, or would do wrongly.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dure.strategies.batches import map_tensors


def gathered(value: Any) -> Tensor:
    """Return a DTensor as the whole plain tensor.

    Communication: an all_gather or all_reduce, unless it is whole already.
    """
    whole: Tensor = value.redistribute(placements=[Replicate()]).to_local()
    return whole


def undivided(values: Any) -> Any:
    """Return a nested structure with every DTensor as the whole plain tensor.

    Communication: an all_gather or all_reduce for each that is not whole.
    """
    return map_tensors(values, _undivided)


def _undivided(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value
    return whole_of_fused(value) if is_fused(value) else gathered(value)


class DividedValues(TorchFunctionMode):
    """What DTensor cannot do with divided values, or would do wrongly: attention by heads, and dropout.

    Each head's attention concerns no other, so ranks compute theirs alone. Dropout draws for the whole value on every
    rank and takes the rank's part: the draws of a tensor group stay one stream, as if one device had drawn. What a
    `fused` layer returns is cut into three as models do it, and brought together for whatever else they do with it.
    """

    def __init__(self, *, has_fused: bool) -> None:
        """Say whether there are `fused` layers, whose outputs are looked for in every argument."""
        super().__init__()
        self._has_fused = has_fused

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Handle what is handled here, for DTensors alone."""
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, DTensor):
            if is_fused(first):
                return func(*args, **kwargs) if func in _METADATA else _on_fused(func, *args, **kwargs)
            handler = _HANDLERS.get(func)
            if handler is not None:
                return handler(func, *args, **kwargs)
        if self._has_fused:
            args, kwargs = map_tensors((args, kwargs), lambda value: _undivided(value) if is_fused(value) else value)
        return func(*args, **kwargs)


def _dropout(func: Any, value: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or p == 0:
        return value
    if any(isinstance(placement, Partial) for placement in value.placements):
        value = value.redistribute(placements=[Replicate()])
    ones = torch.ones(value.shape, dtype=value.dtype, device=value.device)
    factors = functional.dropout(ones, p)
    return value * distribute_tensor(factors, value.device_mesh, value.placements, src_data_rank=None)


def _matmul(func: Any, one: Any, other: Any) -> Any:
    if not _are_divided_alike([one, other]):
        return func(one, other)
    return _like(func(one.to_local(), other.to_local()), one)


def _attention(func: Any, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
    if not _are_divided_alike([query, key, value]):
        # as on one device; DTensor has no rule for it on the CPU
        return func(*undivided((query, key, value, attn_mask)), *args, **kwargs)
    (placement,) = query.placements
    return _like(
        func(
            *(part.to_local() for part in (query, key, value)),
            _part_of_mask(attn_mask, query, query.dim() - placement.dim),
            *args,
            **kwargs,
        ),
        query,
    )


def _are_divided_alike(values: Sequence[Any]) -> bool:
    """Whether all are divided evenly in the same dimension, and it is none of the last two."""
    first = values[0]
    if not all(isinstance(value, DTensor) and value.placements == first.placements for value in values):
        return False
    (placement,) = first.placements
    return (
        isinstance(placement, Shard)
        and all(value.dim() == first.dim() and placement.dim < value.dim() - 2 for value in values)
        and all(value.size(placement.dim) % value.device_mesh.size() == 0 for value in values)
    )


def _part_of_mask(mask: Any, query: Any, from_end: int) -> Any:
    """Return a mask's part for the heads of this rank; one that is for all heads alike is taken as it is."""
    if isinstance(mask, DTensor):
        mask = gathered(mask)
    if mask is None or mask.dim() < from_end or mask.size(mask.dim() - from_end) == 1:
        return mask
    placement = Shard(mask.dim() - from_end)
    return distribute_tensor(mask, query.device_mesh, [placement], src_data_rank=None).to_local()


def _like(local: Tensor, value: Any) -> Tensor:
    return DTensor.from_local(local, value.device_mesh, value.placements, run_check=False)


_HANDLERS: dict[Any, Callable[..., Any]] = {
    functional.dropout: _dropout,
    functional.scaled_dot_product_attention: _attention,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
}


# what a fused layer returns


def as_fused(local: Tensor, mesh: DeviceMesh) -> Tensor:
    """Mark a rank's part `(..., 3 width / ranks)` of queries, keys and values, one after the other, as what it is.

    To DTensor it looks like a part of the last dimension, which it is not: nothing but `DividedValues` may handle it.
    """
    value: Any = DTensor.from_local(local, mesh, [Shard(local.dim() - 1)], run_check=False)
    value.is_fused = True
    return value  # type: ignore[no-any-return]


def is_fused(value: Any) -> bool:
    """Whether something came from `as_fused`."""
    return getattr(value, "is_fused", False) is True and isinstance(value, DTensor)


def whole_of_fused(value: Any) -> Tensor:
    """Return queries, keys and values of all heads `(..., 3 width)`, in the order in which one device has them.

    Communication: one all_gather.
    """
    local = value.to_local()
    apart = local.unflatten(-1, (3, -1))
    return gathered(DTensor.from_local(apart, value.device_mesh, [Shard(apart.dim() - 1)], run_check=False)).flatten(-2)


def _on_fused(func: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Cut into three, by whatever way; anything else is done with the whole."""
    if func in _VIEWS and not kwargs:
        shape = args[0] if args and isinstance(args[0], Sequence) else args
        if (found := _viewed(value, tuple(shape))) is not None:
            return found
    if func in _CUTS and _cuts_in_three(func, value, *args, **kwargs):
        thirds = value.to_local().chunk(3, -1)
        placements = [Shard(value.dim() - 1)]
        return tuple(DTensor.from_local(third, value.device_mesh, placements, run_check=False) for third in thirds)
    return func(whole_of_fused(value), *args, **kwargs)


def _viewed(value: Any, shape: tuple[int, ...]) -> Tensor | None:
    """View as `(..., 3, heads, size)` or `(..., 3, width)`; None for any other shape."""
    known = math.prod(size for size in shape if size != -1)
    shape = tuple(value.numel() // known if size == -1 else size for size in shape)
    width, num_ranks = value.size(-1) // 3, value.device_mesh.size()
    for divided in (len(shape) - 2, len(shape) - 1):
        is_cut = divided > 0 and shape[divided - 1] == 3 and math.prod(shape[divided:]) == width
        if is_cut and shape[divided] % num_ranks == 0:
            local = value.to_local().view(*shape[:divided], shape[divided] // num_ranks, *shape[divided + 1 :])
            return DTensor.from_local(local, value.device_mesh, [Shard(divided)], run_check=False)
    return None


def _cuts_in_three(func: Any, value: Any, size: Any = None, dim: int = 0, **kwargs: Any) -> bool:
    if dim not in (-1, value.dim() - 1):
        return False
    width = value.size(-1) // 3
    return size == 3 if func in _CHUNKS else size in (width, [width] * 3, (width,) * 3)


_VIEWS = (Tensor.view, Tensor.reshape, torch.reshape)
_CHUNKS = (Tensor.chunk, torch.chunk)
_CUTS = (*_CHUNKS, Tensor.split, torch.split)
_METADATA = {
    *(Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__, Tensor.requires_grad.__get__),  # type: ignore[attr-defined]
    *(Tensor.ndim.__get__, Tensor.size, Tensor.dim, Tensor.numel),  # type: ignore[attr-defined]
}
"""What may be asked of a value without caring for the order inside it."""
