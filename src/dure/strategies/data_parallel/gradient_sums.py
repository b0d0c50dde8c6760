"""Sums of gradients over ranks, one gradient at a time: the simplest method, also for gradients in no bucket."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dure.comm.buckets import as_gradient_of
from dure.comm.groups import Group


def add_up_gradients(
    parameters: Sequence[nn.Parameter], group: Group, add_up: Callable[[Tensor], object] | None = None
) -> None:
    """Sum each gradient that any rank has; a gradient that no rank has stays None, as on one device.

    Args:
        parameters: The same on every rank, on one device.
        group: All ranks.
        add_up: Replaces a flat tensor by its sum over all ranks; None for the group's own method.

    Communication: one all_reduce of a number per parameter, and one of each gradient.
    """
    for parameter in used_by_any(parameters, group):
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        flat = gradient.contiguous().view(-1)
        (add_up or group.all_reduce_sum)(flat)
        parameter.grad = as_gradient_of(parameter, flat)


def used_by_any(parameters: Sequence[nn.Parameter], group: Group) -> list[nn.Parameter]:
    """Return the parameters of which any rank has a gradient.

    On an accelerator only a rank that lacks a gradient waits for the others.

    Args:
        parameters: The same on every rank, on one device.
        group: All ranks.

    Communication: one all_reduce of a number per parameter.
    """
    if not parameters:
        return []
    flags = [parameter.grad is not None for parameter in parameters]
    # filled on the device where that is possible: a copy of a list would wait for it
    used = torch.ones(len(flags), device=parameters[0].device)
    if not all(flags):
        used = used.new_tensor(flags)
    group.all_reduce_sum(used)
    if all(flags):
        return [*parameters]
    return [parameter for parameter, by_how_many in zip(parameters, used.tolist(), strict=True) if by_how_many]
