"""Checks of a task's metrics: invalid sums, and values that are implausible for the metric's name."""

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
"""Minimum samples of a batch for which a total below 1 cannot be a sum of hits."""


def check_name(name: object) -> None:
    """Refuse a metric name that cannot be recorded.

    Raises:
        TaskInvalid: The name is not a string, or has characters that are not printable.
    """
    if not isinstance(name, str) or not name.isprintable():
        raise TaskInvalid(f"the task's metrics have one named {name!a:.60}: a name is a string of printable characters")


def check_sum(name: str, measured: Sum) -> None:
    """Refuse a sum whose parts are not numbers, without reading from a device.

    Raises:
        TaskInvalid: The total or the count is not a number, or is a truth value.
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
    """Return a metric's count of one batch after checking its range.

    Raises:
        TaskInvalid: The count is negative, infinite or NaN.
    """
    if not math.isfinite(count) or count < 0:
        raise TaskInvalid(
            f"the metric {name} has a count of {count:g} in a batch: give the number of items that its total is summed "
            "over, 0 or more"
        )
    return count


def doubt(name: str, sums: Sequence[tuple[float, float]], num_samples: int) -> str | None:
    """Return an objection to a metric that is a fraction by its name but not by its value.

    Args:
        name: Name of the metric.
        sums: Total and count of each batch.
        num_samples: Number of samples of all batches.

    Returns:
        The objection; None if there is none, or if the name does not say that the metric is a fraction.
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
