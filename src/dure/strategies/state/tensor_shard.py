"""Shards of tensors that are spread over ranks: what a rank has, and how it gets what it needs from those saved."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Part of a tensor: where it begins and how long it is, in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of_whole(cls, shape: Iterable[int]) -> "Rectangle":
        """Return all of a tensor."""
        sizes = tuple(shape)
        return cls((0,) * len(sizes), sizes)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of a shape has this part."""
        ends = (offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))
        return len(self.sizes) == len(shape) and all(end <= size for end, size in zip(ends, shape, strict=True))

    def overlap(self, other: "Rectangle") -> "Rectangle | None":
        """Return what two parts of one tensor have in common, if anything."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, _ends(self), _ends(other))
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Rectangle(begins, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: "Rectangle") -> tuple[slice, ...]:
        """Return the slices of this part in a tensor that holds `outer` alone."""
        begins = [mine - theirs for mine, theirs in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(begin, begin + size) for begin, size in zip(begins, self.sizes, strict=True))


def _ends(rectangle: Rectangle) -> tuple[int, ...]:
    return tuple(offset + size for offset, size in zip(rectangle.offsets, rectangle.sizes, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShard:
    """This rank's rectangle of a tensor that is spread over ranks."""

    tensor: Tensor
    offsets: tuple[int, ...]
    """Index in the whole tensor at which the shard begins, in each dimension."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    @property
    def rectangle(self) -> Rectangle:
        """The part of the whole tensor that this is."""
        return Rectangle(self.offsets, tuple(self.tensor.shape))

    def cut(self, part: Rectangle) -> "TensorShard":
        """Return a copy of a part of the whole tensor that lies in this shard."""
        return TensorShard(
            tensor=self.tensor[part.within(self.rectangle)].clone(), offsets=part.offsets, shape=self.shape
        )


def as_shard(value: Any) -> "Tensor | TensorShard":
    """Return a `DTensor` as the shard of it that this rank has; anything else as it is.

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
    return TensorShard(tensor=value.to_local(), offsets=tuple(chunks[0].offsets), shape=tuple(value.shape))


def memory_of(value: Tensor | TensorShard) -> tuple[Any, ...] | None:
    """Return where a tensor lies and how it is seen, the same for two that are one; None for one without memory."""
    tensor = value.tensor if isinstance(value, TensorShard) else value
    if tensor.numel() == 0 or tensor.layout != torch.strided or hasattr(type(tensor), "__tensor_flatten__"):
        return None
    memory = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*memory, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def version_of(value: Tensor) -> int:
    """Return the number of changes in place that a tensor's memory has seen; 0 where torch does not count them."""
    return 0 if value.is_inference() else value._version


def whole(tensor: Tensor) -> TensorShard:
    """Return a tensor as its own only shard."""
    return TensorShard(tensor=tensor, offsets=(0,) * tensor.dim(), shape=tuple(tensor.shape))


def own_shard(value: Any) -> TensorShard:
    """Return the shard of a tensor that this rank has, be it all of it."""
    shard = as_shard(value)
    return shard if isinstance(shard, TensorShard) else whole(shard)


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedTensor:
    """A tensor of a checkpoint, as far as it was read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: list[TensorShard]
    """Parts without overlap, on the CPU."""

    def whole(self) -> Tensor:
        """Return all of it, without a copy if it is one shard."""
        return self.part(Rectangle.of_whole(self.shape))

    def part(self, wanted: Rectangle) -> Tensor:
        """Return a part of it, without a copy if that is one shard."""
        for shard in self.shards:
            if shard.rectangle == wanted:
                return shard.tensor
        values = torch.empty(wanted.sizes, dtype=self.dtype)
        self.fill(values, wanted)
        return values

    @torch.no_grad()
    def fill(self, target: Tensor, wanted: Rectangle) -> None:
        """Copy a part of it into a tensor of any dtype and device.

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
        """Let go of what was read."""
        self.shards.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Part of a checkpoint that a rank reads: names in the model, each with a part of its tensor."""

    model: Mapping[str, Rectangle]
    """Parameters and buffers."""
    optimizer: Mapping[str, Rectangle]
    """Parameters, under all their names, whose state in the optimiser is needed."""
    buffers: Collection[str] = ()
    """Buffers that are taken up whole, in whatever shape they were saved."""


def whole_buffers(model: nn.Module) -> dict[str, Tensor | None]:
    """Return a model's buffers that its `state_dict` has whole, or has not as long as they are None, by their names."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if name not in module._non_persistent_buffers_set and (buffer is None or type(buffer) is Tensor)
    }


def rectangles(named: Iterable[tuple[str, Any]]) -> dict[str, Rectangle]:
    """Return which parts of tensors this rank has, by their names; what is no tensor is left out."""
    return {name: own_shard(value).rectangle for name, value in named if isinstance(value, Tensor)}
