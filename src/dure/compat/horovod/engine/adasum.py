"""Adasum: a sum of gradients that adds what is orthogonal and averages what is parallel (Maleki et al., 2020)."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Exchange(Protocol):
    """Group that two ranks exchange tensors in."""

    rank: int
    size: int

    def exchange(self, output: Tensor, tensor: Tensor, peer: int) -> None:
        """Send a tensor to a rank, and receive its tensor."""


def combine(one: Tensor, other: Tensor) -> Tensor:
    """Return the adaptive sum of two gradients of one layer.

    With a and b: `(1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b`. Dot products are computed in float64.
    """
    wide = [each.reshape(-1).to(torch.float64) for each in (one, other)]
    product = float(torch.dot(wide[0], wide[1]))
    squares = [float(torch.dot(each, each)) for each in wide]
    factors = [1.0 - product / (2.0 * square) if square > 0 else 1.0 for square in squares]
    return (wide[0] * factors[0] + wide[1] * factors[1]).to(one.dtype).view_as(one)


def reduce(flat: Tensor, sizes: Sequence[int], group: Exchange | Any) -> Tensor:
    """Return the adaptive sum over all ranks of several layers in one tensor.

    Neighbours combine first, then pairs of pairs, as in a tree. The number of ranks is a power of two.

    Args:
        flat: Elements of all layers, one after another.
        sizes: Number of elements of each layer: coefficients are computed for each.
        group: Ranks.

    Communication: log2(P) exchanges of the whole tensor, blocking.
    """
    distance = 1
    while distance < group.size:
        peer = group.rank ^ distance
        received = torch.empty_like(flat)
        group.exchange(received, flat, peer)
        lower, upper = (flat, received) if group.rank < peer else (received, flat)
        # both ranks compute the same bits, because both add in the order of their ranks
        layers = zip(lower.split(list(sizes)), upper.split(list(sizes)), strict=True)
        flat = torch.cat([combine(one, other) for one, other in layers])
        distance *= 2
    return flat
