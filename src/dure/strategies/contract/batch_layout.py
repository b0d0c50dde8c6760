"""Roles of the values in a batch, found by comparing batches of different numbers of samples.

A tensor whose first dimension equals the batch size may hold the samples, or may have that length by accident. Batches
of two sizes tell the cases apart.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dure.strategies.state.containers import Path, is_container, is_sequence, items_of, tensors_in


class Role(Enum):
    """Relation of a value to the samples of its batch."""

    SAMPLES = "one row or item for each sample"
    SHARED = "the same for any samples"
    CONTAINER = "holds values with roles of their own"
    MIXED = "computed from all samples together"
    UNKNOWN = "an object of an unknown class"


Layout = Mapping[Path, Role]
"""Role of each value by its path; values that differ in kind between the batches are absent."""


def layout_of(examples: Sequence[tuple[int, Any]]) -> Layout:
    """Return the roles of the values in batches of the same data.

    Args:
        examples: Pairs of a number of samples and a batch of that size, with at least two different numbers.
    """
    roles: dict[Path, Role] = {}
    _compare((), [size for size, _ in examples], [batch for _, batch in examples], roles)
    return roles


def _compare(path: Path, sizes: list[int], values: list[Any], roles: dict[Path, Role]) -> None:
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return
    if isinstance(first, Tensor | np.ndarray | int | float | complex | np.generic):
        roles[path] = _role_of_numbers(sizes, values)
    elif isinstance(first, PackedSequence):
        roles[path] = Role.UNKNOWN
    elif is_sequence(first) and [len(value) for value in values] == sizes:
        roles[path] = Role.SAMPLES
    elif (items := items_of(first)) is not None:
        others = [items_of(value) or {} for value in values]
        if any(len(other) != len(items) for other in others) and not isinstance(first, Mapping):
            roles[path] = Role.MIXED
        elif [len(other) for other in others] == sizes:
            roles[path] = Role.MIXED  # a mapping with a key for each sample
        else:
            roles[path] = Role.CONTAINER
            for key in items:
                if all(key in other for other in others):
                    _compare((*path, key), sizes, [other[key] for other in others], roles)


def _role_of_numbers(sizes: list[int], values: list[Any]) -> Role:
    if has_rows(values[0]) and [len(value) for value in values] == sizes:
        return Role.SAMPLES
    return Role.SHARED if all(are_equal(value, values[0]) for value in values) else Role.MIXED


def role_by_size(value: Any, num_samples: int) -> Role:
    """Return the role of a value known from one batch only: a tensor's first dimension is taken for the samples."""
    if isinstance(value, Tensor | np.ndarray):
        return Role.SAMPLES if has_rows(value) else Role.SHARED
    if isinstance(value, PackedSequence):
        return Role.UNKNOWN
    if is_sequence(value) and len(value) == num_samples and is_by_sample(value, num_samples):
        return Role.SAMPLES
    if is_container(value):
        return Role.CONTAINER
    return Role.UNKNOWN if not isinstance(value, nn.Module) and tensors_in(value) else Role.SHARED


def is_by_sample(value: Sequence[Any], num_samples: int) -> bool:
    """Return whether a list of that length has one item per sample, rather than a few tensors of all samples."""
    tensors = [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, tuple):
        # a pair of numbers is more often a size than values of two samples
        return all(isinstance(item, str | bytes) for item in value)
    if tensors:
        return any(not has_rows(tensor) or len(tensor) != num_samples for tensor in tensors)
    return not any(isinstance(item, list | tuple | Mapping) for item in value)


def has_rows(value: Any) -> bool:
    """Return whether a value is a tensor or an array with a first dimension."""
    return isinstance(value, Tensor | np.ndarray) and value.ndim > 0


def are_equal(one: Any, other: Any) -> bool:
    """Return whether two numbers, tensors or arrays have equal values; NaN equals NaN."""
    if isinstance(one, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
            return False
        if one.is_nested or one.layout is not torch.strided:
            return one is other
        other = other.to(one.device)
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, np.ndarray) and one.dtype == object:
        return one is other
    return bool(np.all((one == other) | ((one != one) & (other != other)))) and np.shape(one) == np.shape(other)
