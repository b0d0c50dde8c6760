"""Batches as nested structures: moving them to a device and splitting them by samples."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dure.errors import TaskInvalid
from dure.strategies.contract.batch_layout import Layout, Role, has_rows, role_by_size
from dure.strategies.state.containers import (
    Path,
    is_sequence,
    items_of,
    map_leaves,
    path_text,
    rebuilt,
    resized,
    tensors_in,
)


class Microbatch(NamedTuple):
    """Batch of one backward pass."""

    batch: Any
    """Batch as the task's `loss` takes it, on this rank's (first) device."""
    num_samples: int
    is_padding: bool = False
    """True on a rank with an empty share. The batch is then computed with weight zero, so that every rank takes part in
    the collectives.
    """


class RowWatch:
    """Watch for batches with fewer rows than samples, as when `collate` leaves bad samples out."""

    def __init__(self) -> None:
        self._num_alike = 0
        self._other: str | None = None
        self._num_others = 0

    def see(self, microbatch: Microbatch) -> None:
        """Compare the rows of a batch with its samples."""
        num_samples = microbatch.num_samples
        if _are_tensors_of(num_samples, microbatch.batch):
            self._num_alike += 1
            return
        rows = {tensor.size(0) for tensor in filter(has_rows, tensors_in(microbatch.batch))}  # nested ones have no len
        if rows == {num_samples}:
            self._num_alike += 1
        elif len(rows) == 1 and not microbatch.is_padding:
            self._num_others += 1
            self._other = self._other or f"a batch of {microbatch.num_samples} samples had {rows.pop()} rows"

    @property
    def difference(self) -> str | None:
        """Figures of a batch that had other rows than most; None if there was none."""
        return self._other if self._num_alike > self._num_others else None


def _are_tensors_of(num_rows: int, batch: Any) -> bool:
    """Return whether a batch is a sequence of tensors with a row per sample; a search would take 20 microseconds."""
    if type(batch) not in (tuple, list) or not batch:
        return False
    # a nested tensor has a size, but no shape
    return False not in [type(each) is Tensor and each.dim() > 0 and each.size(0) == num_rows for each in batch]


def map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Apply `change` to every tensor in nested containers, which keep their classes (see `containers`)."""
    return map_leaves(value, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def own_copy(value: Any) -> Any:
    """Return a copy of nested containers and tensors, so that code may change it without changing the originals."""
    return map_leaves(value, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, copies=True)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move a batch's tensors to a device.

    Copies from pinned host memory are asynchronous; copies to the host are waited for. Objects with a method `to`, such
    as those of PyTorch Geometric, move themselves; it is called on a copy of each.
    """

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=_may_arrive_later(device))
        return _moved_by_itself(leaf, device) if _moves_itself(leaf) else leaf

    return map_leaves(batch, moved, _moves_itself)


def _may_arrive_later(device: torch.device) -> bool:
    # kernels on a device follow the copy in its stream; the host reads at once
    return device.type != "cpu"


def _moves_itself(value: Any) -> bool:
    if isinstance(value, Tensor | nn.Module | type):
        return False
    return callable(getattr(type(value), "to", None))


def _moved_by_itself(value: Any, device: torch.device) -> Any:
    own = copy.copy(value)  # `to` may change the object itself, and other devices need their own
    try:
        names = inspect.signature(own.to).parameters
    except ValueError:
        names = {}  # type: ignore[assignment]
    is_named = "non_blocking" in names
    found = own.to(device, non_blocking=_may_arrive_later(device)) if is_named else own.to(device)
    return own if found is None else found


def split_batch(batch: Any, counts: Sequence[int], layout: Layout | None = None) -> list[Any]:
    """Split a batch by samples: tensors along dim 0, lists with one item per sample by position.

    Numbers, strings and 0-dim tensors are passed to every part unchanged.

    Args:
        batch: Nested structure whose tensors are `(B, ...)` with `B = sum(counts)`.
        counts: Samples of each part.
        layout: Roles of the values, found in batches of other sizes. Without it a value's own size decides.

    Raises:
        TaskInvalid: A value cannot be divided by samples.
    """
    return _Split(counts, layout).of(batch, ())


class _Split:
    def __init__(self, counts: Sequence[int], layout: Layout | None) -> None:
        self._counts = counts
        self._starts = [sum(counts[:i]) for i in range(len(counts))]
        self._num_samples = sum(counts)
        self._layout = layout or {}

    def of(self, value: Any, path: Path) -> list[Any]:
        """Return the parts of a value."""
        known = self._layout.get(path)
        role = role_by_size(value, self._num_samples) if known is None else known
        if role is Role.SHARED:
            return [value] * len(self._counts)
        if role is Role.SAMPLES and len(value) == self._num_samples:
            return [_rows(value, start, count) for start, count in zip(self._starts, self._counts, strict=True)]
        items = items_of(value)
        if role is not Role.CONTAINER or items is None:
            raise TaskInvalid(self._why_not(value, role, path_text(path, "batch")))
        parts = {key: self.of(item, (*path, key)) for key, item in items.items()}
        return [rebuilt(value, {key: part[i] for key, part in parts.items()}) for i in range(len(self._counts))]

    def _why_not(self, value: Any, role: Role, where: str) -> str:
        name = type(value).__name__
        if has_rows(value) and len(value) != self._num_samples:
            kind = "tensor" if isinstance(value, Tensor) else "NumPy array"
            return (
                f"a batch of {self._num_samples} samples holds a {kind} of shape {tuple(value.shape)}: to divide a "
                f"batch over devices its tensors need the samples first; put them first in {where}, or use ddp"
            )
        if role is Role.UNKNOWN:
            return (
                f"{where} is a {name}, which holds tensors in a way that dure does not know and so cannot be divided "
                "over devices: give them with the samples first in a dictionary, a tuple or a dataclass, or use ddp"
            )
        return (
            f"{where}, a {name}, changes with the samples of a batch and has no row for each of them, so it cannot be "
            "divided over devices: compute it in the task's loss, or use ddp"
        )


def _rows(value: Any, start: int, count: int) -> Any:
    if isinstance(value, Tensor):
        return _tensor_rows(value, start, count)
    rows = value[start : start + count]
    return resized(value, rows) if is_sequence(value) else rows


def _tensor_rows(tensor: Tensor, start: int, count: int) -> Tensor:
    if tensor.is_nested:
        own = list(tensor.unbind())[start : start + count]
        return torch.nested.as_nested_tensor(own, layout=tensor.layout)
    if tensor.layout is not torch.strided:
        return tensor.index_select(0, torch.arange(start, start + count, device=tensor.device))
    rows = tensor[start : start + count]
    # with its own version counter: what one device changes in place must not count as changed in another's backward
    return rows if rows.requires_grad else rows.data
