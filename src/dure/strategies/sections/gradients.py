"""Scaling and clipping of gradients whose sections are on different ranks, as if they were on one."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from dure import torchcompat
from dure.comm.groups import Group
from dure.strategies.contract.precision import Precision


def share_overflows(group: Group, precision: Precision, optimizer: Optimizer, device: torch.device) -> None:
    """Agree on whether a gradient overflowed: either all ranks skip the step, or none.

    Communication: with fp16 one all_reduce of one number.
    """
    if precision.scaler is not None:
        for found in torchcompat.found_overflows(precision.scaler, optimizer, device):
            group.all_reduce_sum(found)


def clip_by_common_norm(
    group: Group, parameters: Sequence[nn.Parameter], most: float, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Clip each rank's gradients by the norm over all of them.

    Communication: one all_reduce of one number.

    Args:
        group: Ranks that have sections of one model.
        parameters: Parameters of this rank.
        most: Norm above which gradients are scaled down.
        dtype: Dtype of the sum of squares; float64 if the device has it, because the square of a norm may overflow
            float32.
        device: Device of the sum of squares.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    square = torch.zeros((), dtype=dtype, device=device)
    if gradients:
        square += nn.utils.get_total_norm(gradients).to(square).square()
    group.all_reduce_sum(square)
    if gradients:
        nn.utils.clip_grads_with_norm_(parameters, most, square.sqrt().to(gradients[0]))
