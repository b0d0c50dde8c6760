"""Sketches of tensors: a few sums with random signs, by which many steps can be compared without keeping the tensors.

A sketch is linear, so sketches of proportional tensors are proportional, and the norm of a difference is kept on
average (Alon, Matias and Szegedy, "The space complexity of approximating the frequency moments", 1996).
"""

import functools

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

NUM_SUMS = 8
"""Numbers in a sketch."""
_MOST_ELEMENTS = 1 << 16
"""Elements that enter a sketch; of a larger tensor they are taken at even distances."""


def sketch(tensor: Tensor) -> Tensor:
    """Return the sketch of a tensor, of shape `(8,)`, or all its elements if there are no more."""
    found = tensor.detach()
    if isinstance(found, DTensor):
        found = found.full_tensor()
    if found.layout != torch.strided:
        found = found.to_dense()
    flat = found.reshape(-1)
    if len(flat) > _MOST_ELEMENTS:
        flat = flat[:: -(-len(flat) // _MOST_ELEMENTS)]
    flat = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).to("cpu", torch.float64, copy=True)
    if len(flat) <= NUM_SUMS:
        return flat
    flat *= _signs()[: len(flat)]
    rest = -len(flat) % NUM_SUMS
    return torch.nn.functional.pad(flat, (0, rest)).reshape(NUM_SUMS, -1).sum(1)


@functools.cache
def _signs() -> Tensor:
    numbers = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (2 * _MOST_ELEMENTS,), generator=numbers).double() * 2 - 1
