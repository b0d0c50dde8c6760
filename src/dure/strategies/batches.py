"""Batches as nested structures: moving them to a device and splitting them by samples."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch

from dure.errors import TaskInvalid


class Microbatch(NamedTuple):
    """What one backward is computed from."""

    batch: Any
    """As the task's `loss` takes it, on this rank's (first) device."""
    num_samples: int
    is_stand_in: bool = False
    """Of a rank whose share is empty: computed with weight zero so that every rank meets in the collectives."""


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Apply `change` to every tensor of a nested structure of tuples, lists, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(item, change) for item in value)
    if isinstance(value, Mapping):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: map_tensors(getattr(value, f.name), change) for f in fields(value) if f.init})
    return value


def to_device(batch: Any, device: torch.device) -> Any:
    """Move a batch's tensors; pinned host memory is copied without waiting."""
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=True))


def split_batch(batch: Any, counts: Sequence[int]) -> list[Any]:
    """Split a batch by samples: tensors along dim 0, lists of one item per sample by position.

    Numbers, strings and 0-dim tensors go to every part as they are.

    Args:
        batch: Nested structure whose tensors are `(B, ...)` with `B = sum(counts)`.
        counts: Samples of each part.

    Raises:
        TaskInvalid: A tensor whose first dimension is not the samples.
    """
    num_samples = sum(counts)
    starts = [sum(counts[:i]) for i in range(len(counts))]

    def part(value: Any, start: int, count: int) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dim() == 0:
                return value
            if value.size(0) != num_samples:
                raise TaskInvalid(
                    f"a batch of {num_samples} samples holds a tensor of shape {tuple(value.shape)}: to divide a batch "
                    "over devices its tensors need the samples first; put them first, or use ddp"
                )
            return value[start : start + count]
        if isinstance(value, list) and len(value) == num_samples and not any(map(_holds_tensor, value)):
            return value[start : start + count]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(part(item, start, count) for item in value))
        if isinstance(value, tuple | list):
            return type(value)(part(item, start, count) for item in value)
        if isinstance(value, Mapping):
            return {key: part(item, start, count) for key, item in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            return replace(
                value, **{f.name: part(getattr(value, f.name), start, count) for f in fields(value) if f.init}
            )
        return value

    return [part(batch, start, count) for start, count in zip(starts, counts, strict=True)]


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor | tuple | list | Mapping)
