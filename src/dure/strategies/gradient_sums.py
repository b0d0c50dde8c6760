"""Gradients added up over ranks one by one, for parameters that are in no bucket."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


def add_up_gradients(
    parameters: Sequence[nn.Parameter], add_up: Callable[[Tensor], object], device: torch.device
) -> None:
    """Add up each gradient that any rank has; one that no rank has stays None, as on one device.

    Args:
        parameters: The same on every rank.
        add_up: Replaces a flat tensor by its sum over all ranks.
        device: Of the parameters.

    Communication: one `add_up` of a number per parameter, and one for each gradient.
    """
    if not parameters:
        return
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32, device=device)
    add_up(used)
    for parameter, by_how_many in zip(parameters, used.tolist(), strict=True):
        if by_how_many:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
            flat = gradient.contiguous().view(-1)
            add_up(flat)
            # with the strides of its parameter, which fused optimisers ask for
            parameter.grad = torch.empty_like(parameter).copy_(flat.view_as(parameter))
