"""Pieces of tensors that are spread over ranks: what a rank has, and how it gets what it needs from those saved.

Which part of which piece goes where is decided by the planner of torch.distributed.checkpoint: its one public function
is local arithmetic on rectangles and knows DTensor's placements. See docs/decisions/0002-own-checkpoint-format.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """This rank's rectangular piece of a tensor that is spread over ranks."""

    tensor: Tensor
    offsets: tuple[int, ...]
    """Where the piece begins in the whole tensor, in each dimension."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""


def as_piece(value: Any) -> "Tensor | Piece":
    """Return a `DTensor` as the piece of it that this rank has; anything else as it is.

    Raises:
        TypeError: The rank has several separate pieces of it.
    """
    if isinstance(value, Piece):
        return value
    if not hasattr(value, "__create_chunk_list__"):
        assert isinstance(value, Tensor)
        return value
    chunks = value.__create_chunk_list__()
    if len(chunks) != 1:
        raise TypeError(f"a tensor of which one rank has {len(chunks)} separate pieces")
    return Piece(tensor=value.to_local(), offsets=tuple(chunks[0].offsets), shape=tuple(value.shape))


def memory_of(value: Tensor | Piece) -> tuple[Any, ...] | None:
    """Return where a tensor lies and how it is seen, the same for two that are one; None for one without memory."""
    tensor = value.tensor if isinstance(value, Piece) else value
    if tensor.numel() == 0 or tensor.layout != torch.strided or hasattr(type(tensor), "__tensor_flatten__"):
        return None
    memory = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*memory, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def whole(tensor: Tensor) -> Piece:
    """Return a tensor as its own only piece."""
    return Piece(tensor=tensor, offsets=(0,) * tensor.dim(), shape=tuple(tensor.shape))


def assemble(pieces: Sequence[Piece]) -> Tensor:
    """Return the whole tensor of all its pieces; without a copy when there is but one."""
    first = pieces[0]
    if len(pieces) == 1 and tuple(first.tensor.shape) == first.shape:
        return first.tensor
    target = torch.empty(first.shape, dtype=first.tensor.dtype)
    fill(target, pieces)
    return target


def fill(target: Tensor, pieces: Sequence[Piece]) -> None:
    """Copy the saved values into a tensor, or into this rank's shard of a `DTensor`.

    Args:
        target: Of the whole tensor's shape; its own dtype and device are kept.
        pieces: Together the whole tensor, cut in any way.
    """
    is_sharded = hasattr(target, "__create_chunk_list__")
    if not is_sharded and len(pieces) == 1 and tuple(pieces[0].tensor.shape) == tuple(target.shape):
        with torch.no_grad():
            target.copy_(pieces[0].tensor)
        return
    local, chunks = _local_part(target, is_sharded)
    # half a second of imports that a run without shards does not pay
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    for item in create_read_items_for_chunk_list("tensor", _saved_layout(pieces), chunks):
        source = _part(pieces[item.storage_index.index or 0].tensor, item.storage_offsets, item.lengths)
        with torch.no_grad():
            _part(local, item.dest_offsets, item.lengths).copy_(source)


def _local_part(target: Any, is_sharded: bool) -> tuple[Tensor, list[Any]]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if is_sharded:
        return target.to_local(), target.__create_chunk_list__()
    return target, [ChunkStorageMetadata(offsets=torch.Size([0] * target.dim()), sizes=target.shape)]


def _saved_layout(pieces: Sequence[Piece]) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

    chunks = [ChunkStorageMetadata(offsets=torch.Size(p.offsets), sizes=p.tensor.shape) for p in pieces]
    properties = TensorProperties(dtype=pieces[0].tensor.dtype)
    return TensorStorageMetadata(properties=properties, size=torch.Size(pieces[0].shape), chunks=chunks)


def _part(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    return tensor[tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))]
