"""Checks of what a task measures: values that no sum has, and values that a metric of such a name cannot have."""

import math
import numbers
import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dure.errors import TaskInvalid
from dure.records.sums import Sum, exact_sum

_FRACTIONS = frozenset(
    ("accuracy", "acc", "top1", "top5", "precision", "recall", "f1", "auc", "auroc", "iou", "miou", "dice", "correct")
)
_NOT_FRACTIONS = frozenset(("percent", "percentage", "pct", "loss", "error", "count", "num", "total", "log"))
_FEWEST_SAMPLES = 8
"""Samples of a batch from which a total below 1 is no sum of hits."""


def check_name(name: object) -> None:
    """Refuse a name that records cannot have.

    Raises:
        TaskInvalid: It is no string, or one that no file can hold.
    """
    if not isinstance(name, str) or not name.isprintable():
        raise TaskInvalid(f"the task's metrics have one named {name!a:.60}: a name is a string of printable characters")


def check_sum(name: str, measured: Sum) -> None:
    """Refuse a sum of something that is no number. Nothing is read from a device.

    Raises:
        TaskInvalid: Total or count is no number, or a truth value.
    """
    for part, value in (("total", measured.total), ("count", measured.count)):
        if isinstance(value, Tensor):
            is_truth, is_number = value.dtype == torch.bool, not value.is_complex()
        else:
            is_truth, is_number = isinstance(value, bool | np.bool_), isinstance(value, numbers.Real | np.number)
        if is_truth:
            raise TaskInvalid(
                f"the {part} of the metric {name} is a truth value: give how many items it is true of, as "
                "(predicted == label).sum()"
            )
        if not is_number:
            raise TaskInvalid(f"the {part} of the metric {name} is {value!r:.60}: give a number or a scalar tensor")


def check_count(name: str, count: float) -> float:
    """Return a metric's count of one batch, if something can be counted so.

    Raises:
        TaskInvalid: It is negative, infinite or not a number.
    """
    if not math.isfinite(count) or count < 0:
        raise TaskInvalid(
            f"the metric {name} has a count of {count:g} in a batch: give the number of items that its total is summed "
            "over, 0 or more"
        )
    return count


def doubt(name: str, sums: Sequence[tuple[float, float]], num_samples: int) -> str | None:
    """Return what speaks against a metric whose name says that it is a fraction; None for nothing, or another name.

    Args:
        name: The metric's.
        sums: Total and count of each batch.
        num_samples: Of all batches.
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if not words & _FRACTIONS or words & _NOT_FRACTIONS:
        return None
    value = exact_sum(total for total, _ in sums) / exact_sum(count for _, count in sums)
    if not math.isfinite(value):
        return None
    if not 0 <= value <= 1:
        is_of_batches = len(sums) < num_samples and all(count == 1 for _, count in sums)
        why = "counts batches instead of samples" if is_of_batches else "is not what the total is summed over"
        return (
            f"the metric {name} is {value:g}, which is no fraction: its count {why}, or it is a percentage: then name "
            f"it {name}_percent"
        )
    is_a_mean = all(0 <= total <= 1 and count >= _FEWEST_SAMPLES for total, count in sums)
    if is_a_mean and any(total % 1 for total, _ in sums):
        return (
            f"the metric {name} has a total below 1 in every batch of {sums[0][1]:g} and so is {value:g}: a mean is "
            "divided once more by its count; give dure.Sum the sum"
        )
    return None
