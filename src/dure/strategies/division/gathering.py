"""Outputs of several devices, joined to the output that one device would have had."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dure.errors import TaskInvalid
from dure.strategies.contract.batch_layout import are_equal, has_rows, is_by_sample
from dure.strategies.contract.batches import to_device
from dure.strategies.state.containers import Path, is_sequence, items_of, path_text, rebuilt, resized, tensors_in
from dure.strategies.state.not_gathered import NotGathered


def gather(outputs: Sequence[Any], device: torch.device, counts: Sequence[int] | None = None) -> Any:
    """Join the replicas' outputs: tensors along dim 0, lists with one item per sample by concatenation.

    Args:
        outputs: One of each replica, in the order of the samples.
        device: Device of the result.
        counts: Samples of each replica; None if they are not known, so that tensors of any length are joined.

    Raises:
        TaskInvalid: The output as a whole cannot be joined.
    """
    return Gathering(device=device, counts=counts).of(outputs)


@dataclass(frozen=True, kw_only=True)
class Gathering:
    """Join of values that several devices have; others are refused.

    Values that are equal on all devices are kept. A value in a container that cannot be joined becomes a `NotGathered`,
    because most losses read one or two values of many.
    """

    device: torch.device
    """Device of the result."""
    counts: Sequence[int] | None = None
    """Samples of each device; None if unknown, so that tensors of any length are joined; empty to join none."""
    shared: frozenset[Path] = frozenset()
    """Paths of tensors that are known to have no samples, whatever their size."""
    wrong: frozenset[Path] = frozenset()
    """Paths of values that are known to differ from those of one device."""
    subject: str = "the model returned"
    """Beginning of messages."""
    name: str = ""
    """Expression for the values, for messages; empty for the output of a call."""
    cure: str = (
        "dp gathers outputs along the samples; return one row per sample and reduce in the task's loss, or use "
        "balanced_dp or ddp"
    )
    """End of messages."""

    def of(self, values: Sequence[Any]) -> Any:
        """Join one value of each device, in the order of the samples.

        Raises:
            TaskInvalid: They cannot be joined.
        """
        return self._at(list(values), ())

    def _at(self, values: list[Any], path: Path) -> Any:
        first = values[0]
        if path in self.wrong:
            raise TaskInvalid(self._why_wrong(path))
        if any(type(value) is not type(first) for value in values):
            others = ", ".join(dict.fromkeys(type(value).__name__ for value in values))
            raise TaskInvalid(self._why(path, f"objects of different classes ({others})"))
        if isinstance(first, Tensor | np.ndarray):
            return self._arrays(values, path)
        if isinstance(first, torch.device):
            return self.device
        items = items_of(first)
        if items is None:
            return self._leaf(values, path)
        if self._is_by_sample(values):
            return resized(first, [item for value in values for item in to_device(value, self.device)])
        all_items = [items_of(value) or {} for value in values]
        if any(other.keys() != items.keys() for other in all_items):
            kind = type(first).__name__
            raise TaskInvalid(self._why(path, f"a {kind} with other items"))
        return rebuilt(first, {key: self._item([other[key] for other in all_items], (*path, key)) for key in items})

    def _item(self, values: list[Any], path: Path) -> Any:
        try:
            return self._at(values, path)
        except TaskInvalid as error:
            return NotGathered(str(error))

    def _is_by_sample(self, values: list[Any]) -> bool:
        counts = list(self.counts or ())
        if not is_sequence(values[0]) or [len(value) for value in values] != counts:
            return False
        return len(set(counts)) > 1 or is_by_sample(values[0], counts[0])

    def _arrays(self, values: list[Any], path: Path) -> Any:
        lengths = [len(value) if has_rows(value) else None for value in values]
        is_by_rows = None not in lengths if self.counts is None else lengths == list(self.counts)
        if is_by_rows and path not in self.shared:
            return self._joined(values, path)
        if all(are_equal(value, values[0]) for value in values):
            return values[0]
        if values[0].ndim == 0:
            raise TaskInvalid(self._why(path, "a scalar"))
        length = f" for {self.counts[0]} samples" if self.counts else ""
        raise TaskInvalid(self._why(path, f"a tensor of shape {tuple(values[0].shape)}{length}"))

    def _joined(self, values: list[Any], path: Path) -> Any:
        if isinstance(values[0], np.ndarray):
            return np.concatenate(values)
        moved = [value.to(self.device) for value in values]
        if moved[0].is_nested:
            rows = [row for value in moved for row in value.unbind()]
            return torch.nested.as_nested_tensor(rows, layout=moved[0].layout)
        try:
            return torch.cat(moved)
        except (RuntimeError, NotImplementedError) as error:
            shapes = ", ".join(str(tuple(value.shape)) for value in values)
            raise TaskInvalid(self._why(path, f"tensors of shapes {shapes}, which do not fit each other")) from error

    def _leaf(self, values: list[Any], path: Path) -> Any:
        first = values[0]
        if all(value is first for value in values):
            return first
        if tensors_in(values) or isinstance(first, nn.Module):
            raise TaskInvalid(self._why(path, f"a {type(first).__name__}, whose class dp does not know,"))
        other = next((value for value in values if not _are_same(value, first)), None)
        if other is None:
            return first
        raise TaskInvalid(self._why(path, f"different values ({first!r:.40} and {other!r:.40})"))

    def _why(self, path: Path, seen: str) -> str:
        return f"{self.subject} {seen} on each device{self._where(path)}: {self.cure}"

    def _why_wrong(self, path: Path) -> str:
        return (
            f"{self.subject} something else{self._where(path)} for the parts of a batch than for the whole of it: it "
            "mixes samples, or an argument that is as long as the batch is not divided by them; use balanced_dp or ddp"
        )

    def _where(self, path: Path) -> str:
        return f" in {path_text(path, self.name or 'output')}" if path or self.name else ""


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, int | float | complex | np.generic):
        return are_equal(one, other)
    try:
        return bool(one == other)
    except Exception:  # weak references to tensors are compared as these, element by element
        return False
