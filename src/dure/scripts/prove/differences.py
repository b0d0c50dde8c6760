"""Relative differences between tensors of several ranks, and of one process."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PROPORTIONAL = 1e-3
"""Relative difference up to which a gradient counts as a multiple of another."""


@dataclass(frozen=True)
class Difference:
    """Largest relative difference among tensors of the same names."""

    value: float = 0.0
    name: str = ""


def largest_between(of_ranks: Sequence[Mapping[str, Tensor]]) -> Difference:
    """Return the largest difference of any rank from the first."""
    return largest([(of_ranks[0], other) for other in of_ranks[1:]]) if of_ranks else Difference()


def largest(pairs: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]) -> Difference:
    largest = Difference()
    for one, other in pairs:
        scale = max((float(t.double().abs().max()) for t in one.values() if t.numel()), default=1.0) or 1.0
        for name, tensor in one.items():
            if name in other:
                value = _relative(tensor, other[name], 1e-3 * scale)
                if value > largest.value:
                    largest = Difference(value, name)
    return largest


def _relative(one: Tensor, other: Tensor, least: float) -> float:
    """Return the norm of a difference relative to the larger tensor's, or to a small part of the largest of all."""
    if one.shape != other.shape:
        return math.inf
    if not one.numel():
        return 0.0
    one, other = one.double(), other.double()
    are_nan = one.isnan() & other.isnan()
    difference = float(torch.where(are_nan, 0.0, one - other).norm())
    size = max(float(one.norm()), float(other.norm()), least * math.sqrt(one.numel()), 1e-300)
    return difference / size if math.isfinite(difference) else math.inf


def common_factor(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float | None:
    """Return the number by which all gradients of one are those of the other; None if there is none."""
    flat = torch.cat([one[name].double().flatten() for name in one])
    others = torch.cat([other[name].double().flatten() for name in one])
    square = float(others @ others)
    if not square:
        return None
    factor = float(flat @ others) / square
    rest = float((flat - factor * others).norm())
    return factor if rest <= PROPORTIONAL * float(flat.norm()) else None


def rates_differ(rates: Sequence[float], others: Sequence[float]) -> bool:
    return len(rates) != len(others) or any(
        not math.isclose(rate, other, rel_tol=1e-6) for rate, other in zip(rates, others, strict=False)
    )
