"""Choice of an optimiser's parameters for a trial, and the shapes of their stand-ins.

All choices follow from the groups alone, so that they are the same on all ranks.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor

_SMALL_PER_GROUP = 2
_MOST_PER_DIMENSION = 4
_MOST_LONG = 6
"""Number of parameters in the trial of more steps."""
_MOST_WIDE = 256
_WIDE_ELEMENTS = 2**17
_MOST_LARGE = 4
_LARGE_ELEMENTS = 2**17
"""Elements of one large parameter."""
_MOST_TRACED = 16


@dataclass(frozen=True, slots=True, eq=False)
class StandIn:
    """Parameter that a trial steps in a different shape."""

    group: int
    parameter: Tensor
    shape: tuple[int, ...]


Groups = Sequence[Sequence[Tensor]]
"""Trained parameters of each group."""


def small(groups: Groups) -> list[StandIn]:
    """Choose the first parameters of each group, at most four elements to a dimension."""
    return [_small(index, p) for index, group in enumerate(groups) for p in group[:_SMALL_PER_GROUP]]


def few(groups: Groups) -> list[StandIn]:
    """Choose from all groups in turn, different numbers of dimensions first, at most four elements to a dimension."""
    turns = zip_longest(*map(_other_dimensions_first, groups))
    chosen = [(index, p) for turn in turns for index, p in enumerate(turn) if p is not None][:_MOST_LONG]
    return [_small(index, parameter) for index, parameter in sorted(chosen, key=lambda each: each[0])]


def wide(groups: Groups, share: float = 1.0) -> list[StandIn]:
    """Choose all parameters, or if there are many some spread over each group; in their true shapes if these fit.

    Args:
        groups: Trained parameters.
        share: Fraction of the usual number of elements.
    """
    number = sum(map(len, groups))
    chosen = [
        (index, parameter)
        for index, group in enumerate(groups)
        for parameter in _spread(group, max(_SMALL_PER_GROUP, _MOST_WIDE * len(group) // max(number, 1)))
    ]
    fits = sum(parameter.numel() for _, parameter in chosen) <= _WIDE_ELEMENTS * share
    most = max(int(_WIDE_ELEMENTS * share) // max(len(chosen), 1), 16)
    return [StandIn(index, p, tuple(p.shape) if fits else _within(p.shape, most)) for index, p in chosen]


def large(groups: Groups, share: float = 1.0) -> list[StandIn]:
    """Choose the largest of each group and number of dimensions; the first also with its longest dimension whole.

    Args:
        groups: Trained parameters.
        share: Fraction of the usual number of elements.
    """
    most = int(_LARGE_ELEMENTS * share)
    largest: dict[tuple[int, int], Tensor] = {}
    for index, group in enumerate(groups):
        for parameter in group:
            known = largest.get((index, parameter.dim()))
            if known is None or parameter.numel() > known.numel():
                largest[index, parameter.dim()] = parameter
    by_size = sorted(largest.items(), key=lambda each: -each[1].numel())[: _MOST_LARGE - 1]
    chosen = [StandIn(index, parameter, _within(parameter.shape, most)) for (index, _), parameter in by_size]
    long = [
        StandIn(each.group, each.parameter, _with_longest(each.parameter.shape, most))
        for each in chosen[:1]
        if each.shape != each.parameter.shape
    ]
    return sorted([*chosen, *long], key=lambda each: each.group)


def of_true_shapes(groups: Groups) -> tuple[list[StandIn], list[StandIn]]:
    """Choose the largest parameters of different shapes; return them in their shapes, and in small ones."""
    distinct: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    for index, group in enumerate(groups):
        for parameter in group:
            distinct.setdefault((index, tuple(parameter.shape)), parameter)
    chosen = sorted(distinct.items(), key=lambda each: -each[1].numel())[:_MOST_TRACED]
    chosen.sort(key=lambda each: each[0][0])
    return (
        [StandIn(index, parameter, shape) for (index, shape), parameter in chosen],
        [_small(index, parameter) for (index, _), parameter in chosen],
    )


def _small(group: int, parameter: Tensor) -> StandIn:
    return StandIn(group, parameter, _at_most(parameter.shape, _MOST_PER_DIMENSION))


def _other_dimensions_first(parameters: Sequence[Tensor]) -> list[Tensor]:
    first = {parameter.dim(): parameter for parameter in reversed(parameters)}
    chosen = {id(parameter) for parameter in first.values()}
    return [*first.values(), *(parameter for parameter in parameters if id(parameter) not in chosen)]


def _spread(parameters: Sequence[Tensor], most: int) -> Sequence[Tensor]:
    """Return at most `most` parameters, the first and the last among them."""
    if len(parameters) <= most:
        return parameters
    return [parameters[number * (len(parameters) - 1) // (most - 1)] for number in range(most)]


def _at_most(shape: Iterable[int], most: int) -> tuple[int, ...]:
    return tuple(min(size, most) for size in shape)


def _within(shape: Iterable[int], most_elements: int) -> tuple[int, ...]:
    """Cut the longest dimensions of a shape to one length, the largest that keeps it within `most_elements`."""
    shape = tuple(shape)
    low, high = 1, max(shape, default=1)
    while low < high:
        middle = (low + high + 1) // 2
        if math.prod(_at_most(shape, middle)) <= most_elements:
            low = middle
        else:
            high = middle - 1
    return _at_most(shape, low)


def _with_longest(shape: Sequence[int], most_elements: int) -> tuple[int, ...]:
    """Cut a shape to at most `most_elements`, its longest dimension last."""
    longest = min(max(shape), most_elements)
    place = shape.index(max(shape))
    others = _within([1 if dim == place else size for dim, size in enumerate(shape)], most_elements // longest)
    return tuple(longest if dim == place else size for dim, size in enumerate(others))
