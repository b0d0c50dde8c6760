"""Opening of an algorithm on all ranks of a group."""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from dure.comm.algorithms.base import AllReduce
from dure.comm.algorithms.table import find_algorithm

if TYPE_CHECKING:
    import torch.distributed as dist


def open_all_reduce(
    name: str, process_group: "dist.ProcessGroup | None" = None, *, hosts: Sequence[int] | None = None
) -> AllReduce:
    """Open an algorithm on all ranks of a process group, which then call it in the same order.

    Args:
        name: One of `ALGORITHMS`.
        process_group: Group for the tensors' type of device; None for the default group. Code that communicates from
            its own thread needs its own group.
        hosts: Host number of each rank, the same on all ranks; None if all are on one host.

    Raises:
        SpecInvalid: There is no such algorithm.
    """
    module_name, _, class_name = find_algorithm(name).implementation.partition(":")
    if not class_name:
        from dure.comm.algorithms.over_wire import AllReduceOverWire  # imports torch
        from dure.comm.algorithms.wire import Wire

        return AllReduceOverWire(name, Wire(process_group, hosts=hosts))
    implementation = getattr(importlib.import_module(module_name), class_name)
    return cast(AllReduce, implementation(process_group, hosts=hosts))
