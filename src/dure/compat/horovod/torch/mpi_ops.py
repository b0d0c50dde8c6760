"""Names of `horovod.torch.mpi_ops`: start and end, ranks, builds and all collectives."""

from typing import Any

from dure.compat.horovod.common import basics, process_sets
from dure.compat.horovod.common.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    size,
    start_timeline,
    stop_timeline,
)
from dure.compat.horovod.common.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from dure.compat.horovod.engine.failures import HorovodInternalError
from dure.compat.horovod.engine.requests import ADASUM as Adasum
from dure.compat.horovod.engine.requests import AVERAGE as Average
from dure.compat.horovod.engine.requests import MAX as Max
from dure.compat.horovod.engine.requests import MIN as Min
from dure.compat.horovod.engine.requests import PRODUCT as Product
from dure.compat.horovod.engine.requests import SUM as Sum
from dure.compat.horovod.torch.compression import Compression
from dure.compat.horovod.torch.handles import poll, synchronize
from dure.compat.horovod.torch.movements import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    join,
)
from dure.compat.horovod.torch.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start Horovod: all ranks call this.

    Args:
        comm: Ranks that take part; None for all. MPI communicators are refused.
        process_sets: Process sets to register, or `dynamic` to allow `add_process_set` later.

    Raises:
        ValueError: An argument is invalid.
        HorovodInternalError: The other ranks have not come.
    """
    basics.start(basics.ranks_of(comm))
    _set_up(process_sets)


def shutdown() -> None:
    """End Horovod; collectives of other ranks that are not complete fail."""
    basics.stop()


_set_up = process_sets.setup

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
