"""Sums of gradients over ranks, one gradient at a time: the simplest method, also for gradients in no bucket."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
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


def sum_of_sparse(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of a sparse gradient over ranks, by dense messages: NCCL has no others.

    Args:
        gradient: On an accelerator. Rows that occur several times are added first.
        group: All ranks.

    Communication: an all_gather of one number, and two of as many indices and rows as the rank with the most has. The
    host waits for the first one.
    """
    own = gradient.coalesce()
    count = torch.full((1,), own._nnz(), dtype=torch.int64, device=own.device)
    counts = torch.cat(_gathered(count, group)).tolist()
    places, rows = own.indices().T, own.values()
    most = max(counts)
    all_places, all_rows = (
        [theirs[:number] for theirs, number in zip(_gathered(_padded(part, most), group), counts, strict=True)]
        for part in (places, rows)
    )
    return torch.sparse_coo_tensor(torch.cat(all_places).T, torch.cat(all_rows), own.shape).coalesce()


def _padded(rows: Tensor, number: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(number - len(rows), *rows.shape[1:])])


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered
