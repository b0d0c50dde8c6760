"""Process groups and their collectives."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def all_gather_single(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Gather every rank's `input` (N,) into `output` (world_size * N,) by rank.

    2.13 has this name and deprecates `all_gather_into_tensor`, the only one that 2.11 has.

    Communication: one blocking all_gather over `group`; sends (world_size - 1) * N elements per rank.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(output, input, group=group)


def reduce_scatter_single(output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum every rank's `input` (world_size * N,) and store part `rank` of it in `output` (N,).

    2.13 has this name and deprecates `reduce_scatter_tensor`, the only one that 2.11 has.

    Communication: one blocking reduce_scatter over `group`; sends (world_size - 1) * N elements per rank.
    """
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce_scatter(output, input, group=group)


def group_timeout_seconds(group: dist.ProcessGroup | None = None) -> float:
    """Return the timeout of collectives of CPU tensors over `group` (private in torch)."""
    backend = (group or dist.distributed_c10d._get_default_group())._get_backend(torch.device("cpu"))
    return backend.options._timeout.total_seconds()


def default_store() -> dist.Store:
    """Return the store of the default group (private in torch)."""
    return dist.distributed_c10d._get_default_store()


def abort_process_groups() -> None:
    """Destroy every process group without waiting for other ranks (private in torch; for the backends of devices).

    `destroy_process_group` shuts NCCL's communicators down in an orderly way, which waits for calls in progress. Ranks
    that wait for this one in a collective never get there.
    """
    dist.distributed_c10d._abort_process_group()


AllgatherOptions = dist.distributed_c10d.AllgatherOptions
"""Options class of a collective that has no public name."""


def give_gloo(
    group: dist.ProcessGroup, store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Set gloo as the backend of a process group written in Python, for every call that it does not override.

    Registering backends is private in torch.

    Args:
        group: An object of a class that inherits from `torch.distributed.ProcessGroup`.
        store: Store of this group alone.
        rank: Rank in this group.
        world_size: World size of this group.
        timeout: Timeout of every call.

    Returns:
        A plain group over the same gloo, for calls that the group overrides but does not support.

    Communication: gloo's rendezvous through the store, blocking.
    """
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world_size, timeout)
    plain = dist.ProcessGroup(store, rank, world_size)
    for one in (group, plain):
        one._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        one._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return plain


def check_reduction(engine: DistributedDataParallel) -> None:
    """Check that backward produced every gradient that DDP reduces: other ranks wait for a missing one.

    Raises:
        RuntimeError: One is missing.
    """
    engine.reducer._check_reducer_finalized()


def buffer_option(*, sends_in_forward: bool) -> dict[str, Any]:
    """Return the argument of DDP for rank 0's buffers, which has another name since torch 2.13."""
    names = inspect.signature(nn.parallel.DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": sends_in_forward}


@contextmanager
def replaced_collectives(instead: Callable[[str, Callable[..., Any]], Any]) -> Iterator[None]:
    """Replace the collectives of torch.distributed in all modules that imported them.

    Each is a function in a wrapper that logs errors, and the wrapper finds it in its closure (private in torch).

    Args:
        instead: Function from a collective's name and function to the function to call.
    """
    cells: list[tuple[Any, Any]] = []
    for name, function in vars(torch.distributed.distributed_c10d).items():
        is_logged = type(function) is FunctionType and "func" in function.__code__.co_freevars
        if is_logged and hasattr(function, "__wrapped__"):
            cell = function.__closure__[function.__code__.co_freevars.index("func")]
            cells.append((cell, cell.cell_contents))
            cell.cell_contents = instead(name, cell.cell_contents)
    try:
        yield
    finally:
        for cell, contents in cells:
            cell.cell_contents = contents
