"""Calls that a script makes of torch, observed from outside; they return what they would without it (private in torch).

Each observer receives what it needs to time a call, and an error in it is an error of the call: observers never raise.
"""

import functools
import importlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


def observe_fetches(begin: Callable[[], None], end: Callable[[object, object], None]) -> None:
    """Observe every fetch of a batch from a `DataLoader`.

    Args:
        begin: Called before a fetch.
        end: Called after it with the iterator and the batch; with None for the batch if there is none left.
    """
    kind = importlib.import_module("torch.utils.data.dataloader")._BaseDataLoaderIter
    fetch = kind.__next__

    @functools.wraps(fetch)
    def observed(self: Any) -> Any:
        begin()
        batch = None
        try:
            batch = fetch(self)
        finally:
            end(self, batch)
        return batch

    kind.__next__ = observed


def num_workers_of(iterator: Any) -> int:
    """Return the number of worker processes of a `DataLoader`'s iterator."""
    return int(getattr(iterator, "_num_workers", 0))


def observe_backwards(begin: Callable[[object], None], end: Callable[[], None]) -> None:
    """Observe every backward, also those within one.

    Args:
        begin: Called before it with the tensor, or the tensors, from which it starts.
        end: Called after it.
    """
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def observed(tensors: Any, *args: Any, **settings: Any) -> None:
        begin(tensors)
        try:
            backward(tensors, *args, **settings)
        finally:
            end()

    torch.autograd.backward = observed


def observe_waits(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Observe every wait for a collective of which Python knows; those that `DistributedDataParallel` starts are not.

    Args:
        begin: Called before a wait.
        end: Called after it.
    """
    if not dist.is_available():
        return
    kind: Any = dist.Work
    wait = kind.wait

    @functools.wraps(wait)
    def observed(self: Any, *args: Any, **settings: Any) -> Any:
        begin()
        try:
            return wait(self, *args, **settings)
        finally:
            end()

    kind.wait = observed


def observe_replicas(created: Callable[[Any], None]) -> None:
    """Call a function with every `DistributedDataParallel` after it was created."""
    if not dist.is_available():
        return
    kind: Any = importlib.import_module("torch.nn.parallel.distributed").DistributedDataParallel
    create = kind.__init__

    @functools.wraps(create)
    def observed(self: Any, *args: Any, **settings: Any) -> None:
        create(self, *args, **settings)
        created(self)

    kind.__init__ = observed


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """Reduction of gradients in one backward of a `DistributedDataParallel`."""

    waited_seconds: float
    """Seconds of the backward after this rank's gradients were complete."""
    num_buckets: int
    gradient_bytes: int
    bucket_cap_bytes: int
    """Size up to which a bucket is filled."""
    unused_bytes: int | None
    """Bytes of the parameters that got no gradient; None if they were not searched for."""

    def measured(self) -> dict[str, float]:
        """Return what a step record has of it in addition."""
        found: dict[str, float] = {
            "buckets": self.num_buckets,
            "gradient_bytes": self.gradient_bytes,
            "bucket_cap_bytes": self.bucket_cap_bytes,
        }
        return found if self.unused_bytes is None else found | {"unused_bytes": self.unused_bytes}


class ReplicaClock:
    """Clock of the last synchronised backward of a `DistributedDataParallel` on the CPU.

    Its reducer measures when each rank's gradients were complete, and when all were averaged. On accelerators it would
    wait for events, so this is not used there.
    """

    def __init__(self, replica: Any) -> None:
        self._replica = weakref.ref(replica)
        replica._set_ddp_runtime_logging_sample_rate(1)
        self._iteration = -1

    def last_reduction(self) -> Reduction | None:
        """Return the reduction of the last backward; None if it was not synchronised, or the module is gone."""
        replica = self._replica()
        if replica is None:
            return None
        replica.logger.set_runtime_stats_and_log()
        found = replica.logger._get_ddp_logging_data().ints_map
        iteration, self._iteration = self._iteration, int(found.get("iteration", -1))
        if iteration == self._iteration or "backward_comm_time" not in found:
            return None
        # both in nanoseconds: all communication, and what of it ended before the gradients were complete
        exposed = found["backward_comm_time"] - found["backward_compute_comm_overlap_time"]
        return Reduction(
            waited_seconds=max(float(exposed), 0.0) / 1e9,
            num_buckets=int(found.get("num_buckets_reduced", 0)),
            gradient_bytes=int(found.get("total_parameter_size_bytes", 0)),
            bucket_cap_bytes=int(found.get("bucket_cap_bytes", 0)),
            unused_bytes=int(found.get("unused_parameter_size", 0)) if found.get("find_unused_parameters") else None,
        )


def observe_group_ends(begin: Callable[[], None]) -> None:
    """Call a function before process groups are destroyed, and their records with them."""
    if not dist.is_available():
        return
    destroy = dist.destroy_process_group

    @functools.wraps(destroy)
    def observed(*args: Any, **settings: Any) -> None:
        begin()
        destroy(*args, **settings)

    dist.destroy_process_group = observed
    dist.distributed_c10d.destroy_process_group = observed


def observe_saves(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Observe every `torch.save`.

    Args:
        begin: Called before it.
        end: Called after it.
    """
    save = torch.save

    @functools.wraps(save)
    def observed(*args: Any, **settings: Any) -> None:
        begin()
        try:
            save(*args, **settings)
        finally:
            end()

    torch.save = observed
