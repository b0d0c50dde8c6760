"""From the pieces that a tensor was saved in to the piece, or the whole, that a rank needs now.

Which part of which piece goes where is decided by the planner of torch.distributed.checkpoint: its one public function
is local arithmetic on rectangles and knows DTensor's placements. See docs/decisions/0002-own-checkpoint-format.md.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dure.training.snapshot import Piece


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
