"""Scaling and clipping of gradients whose sections are on different ranks, as if they were on one."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dure.comm.groups import Group
from dure.strategies.contract.precision import Precision
from dure.torchcompat.gradients import clip_to_norm
from dure.torchcompat.optimizers import found_overflows


def share_overflows(group: Group, precision: Precision, optimizer: Optimizer, device: torch.device) -> None:
    """Agree on whether a gradient overflowed: either all ranks skip the step, or none.

    Communication: with fp16 one all_reduce of one number.
    """
    if precision.scaler is not None:
        for found in found_overflows(precision.scaler, optimizer, device):
            group.all_reduce_sum(found)


def clip_by_common_norm(group: Group, parameters: Sequence[nn.Parameter], most: float, *, square: Tensor) -> None:
    """Clip each rank's gradients by the norm over all of them.

    Communication: one all_reduce of one number.

    Args:
        group: Ranks that have sections of one model.
        parameters: Parameters of this rank.
        most: Norm above which gradients are scaled down.
        square: Square of the norm of this rank's gradients, a scalar; it becomes that of all.
    """
    group.all_reduce_sum(square)
    clip_to_norm(parameters, most, square)


def square_of_norm(parameters: Sequence[nn.Parameter], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the square of the norm of gradients, a scalar.

    Args:
        parameters: Parameters with the gradients, or without.
        dtype: Dtype of the result; float64 if the device has it, because a square may overflow float32.
        device: Device of the result.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    square = torch.zeros((), dtype=dtype, device=device)
    return square + nn.utils.get_total_norm(gradients).to(square).square() if gradients else square
