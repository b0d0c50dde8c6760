"""Shards of tensors that are divided over ranks: the part of each rank, and its assembly from saved shards."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Part of a tensor: its start and its length in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of_whole(cls, shape: Iterable[int]) -> "Rectangle":
        """Return the rectangle of a whole tensor."""
        sizes = tuple(shape)
        return cls((0,) * len(sizes), sizes)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of a shape contains this part."""
        ends = (offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))
        return len(self.sizes) == len(shape) and all(end <= size for end, size in zip(ends, shape, strict=True))

    def overlap(self, other: "Rectangle") -> "Rectangle | None":
        """Return the intersection of two parts of one tensor, or None."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, _ends(self), _ends(other))
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Rectangle(begins, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: "Rectangle") -> tuple[slice, ...]:
        """Return the slices of this part in a tensor that holds only `outer`."""
        begins = [mine - theirs for mine, theirs in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(begin, begin + size) for begin, size in zip(begins, self.sizes, strict=True))


def _ends(rectangle: Rectangle) -> tuple[int, ...]:
    return tuple(offset + size for offset, size in zip(rectangle.offsets, rectangle.sizes, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShard:
    """Shard of a tensor on this rank, a rectangle of the whole."""

    tensor: Tensor
    offsets: tuple[int, ...]
    """Index in the whole tensor at which the shard begins, in each dimension."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    @property
    def rectangle(self) -> Rectangle:
        """Rectangle of this shard in the whole tensor."""
        return Rectangle(self.offsets, tuple(self.tensor.shape))

    def cut(self, part: Rectangle) -> "TensorShard":
        """Return a copy of a part of the whole tensor that lies in this shard."""
        return TensorShard(
            tensor=self.tensor[part.within(self.rectangle)].clone(), offsets=part.offsets, shape=self.shape
        )


def as_shard(value: Any) -> "Tensor | TensorShard":
    """Return a `DTensor` as its shard on this rank; anything else unchanged.

    Raises:
        TypeError: The rank has several separate shards of it.
    """
    if isinstance(value, TensorShard):
        return value
    if not hasattr(value, "__create_chunk_list__"):
        assert isinstance(value, Tensor)
        return value
    chunks = value.__create_chunk_list__()
    if len(chunks) != 1:
        raise TypeError(f"a tensor of which one rank has {len(chunks)} separate shards")
    return TensorShard(tensor=value.to_local(), offsets=_offsets_of(value), shape=tuple(value.shape))


def _offsets_of(value: Any) -> tuple[int, ...]:
    """Return the index in the whole tensor at which this rank's part of a `DTensor` begins.

    If two axes of the mesh divide one dimension, the one with a split factor divided what the other had left. Torch
    computes these offsets the other way round, which is wrong for sizes that do not divide.
    """
    mesh = value.device_mesh
    axes = list(zip(value.placements, mesh.shape, mesh.get_coordinate(), strict=True))
    offsets, sizes = [0] * value.dim(), list(value.shape)
    for placement, num_parts, index in sorted(axes, key=lambda axis: hasattr(axis[0], "split_factor")):
        if not placement.is_replicate():
            dim = placement.dim
            longest = -(-sizes[dim] // num_parts)
            begin = min(longest * index, sizes[dim])
            offsets[dim] += begin
            sizes[dim] = min(longest, sizes[dim] - begin)
    return tuple(offsets)


def memory_of(value: Tensor | TensorShard) -> tuple[Any, ...] | None:
    """Return the memory and layout of a tensor, equal for two that are the same; None for one without memory."""
    tensor = value.tensor if isinstance(value, TensorShard) else value
    if tensor.numel() == 0 or tensor.layout != torch.strided or hasattr(type(tensor), "__tensor_flatten__"):
        return None
    memory = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*memory, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def version_of(value: Tensor) -> int:
    """Return the number of in-place changes of a tensor's memory; 0 if torch does not count them."""
    return 0 if value.is_inference() else value._version


def whole(tensor: Tensor) -> TensorShard:
    """Return a tensor as its own only shard."""
    return TensorShard(tensor=tensor, offsets=(0,) * tensor.dim(), shape=tuple(tensor.shape))


def own_shard(value: Any) -> TensorShard:
    """Return the shard of a tensor on this rank, possibly all of it."""
    shard = as_shard(value)
    return shard if isinstance(shard, TensorShard) else whole(shard)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """Tensor of a checkpoint, as far as it was read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: list[TensorShard]
    """Parts without overlap, on the CPU."""

    def whole(self) -> Tensor:
        """Return the whole tensor, without a copy if it is one shard."""
        return self.part(Rectangle.of_whole(self.shape))

    def part(self, wanted: Rectangle) -> Tensor:
        """Return a part of the tensor, without a copy if that is one shard."""
        for shard in self.shards:
            if shard.rectangle == wanted:
                return shard.tensor
        values = torch.empty(wanted.sizes, dtype=self.dtype)
        self.fill(values, wanted)
        return values

    @torch.no_grad()
    def fill(self, target: Tensor, wanted: Rectangle) -> None:
        """Copy a part of the tensor into one of any dtype and device.

        Raises:
            RuntimeError: Not all of the part was read.
        """
        num_filled = 0
        for shard in self.shards:
            if (common := shard.rectangle.overlap(wanted)) is not None:
                target[common.within(wanted)].copy_(shard.tensor[common.within(shard.rectangle)])
                num_filled += common.numel
        if num_filled != wanted.numel:
            raise RuntimeError(f"{num_filled} of {wanted.numel} items of a saved tensor have been read")

    def release(self) -> None:
        """Release the memory."""
        self.shards.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Part of a checkpoint that a rank reads: names in the model, each with a part of its tensor."""

    model: Mapping[str, Rectangle]
    """Parameters and buffers, with the part of each."""
    optimizer: Mapping[str, Rectangle]
    """Parameters, under all their names, whose optimiser state is needed, with the part of each."""
    buffers: Collection[str] = ()
    """Buffers that are read whole, in the shape in which they were saved."""


def whole_buffers(model: nn.Module) -> dict[str, Tensor | None]:
    """Return a model's buffers that its `state_dict` has whole, or omits while they are None, by their names."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if name not in module._non_persistent_buffers_set and (buffer is None or type(buffer) is Tensor)
    }


def rectangles(named: Iterable[tuple[str, Any]]) -> dict[str, Rectangle]:
    """Return this rank's parts of tensors, by their names; other values are left out."""
    return {name: own_shard(value).rectangle for name, value in named if isinstance(value, Tensor)}
