"""Calls that a script makes of torch, observed from outside; they return what they would without it (private in torch).

Observers never raise. A function that is replaced is replaced wherever its module and name say that it is, so that it
can still be pickled; while the compiler traces one, it sees the original alone.
"""

import functools
import importlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Begin = Callable[[Any], None]
"""Observer that is called before a call, with its first argument."""
End = Callable[[], None]
"""Observer that is called after a call, also one that raised."""


def _observed(function: Callable[..., Any], begin: Begin, end: End) -> Callable[..., Any]:
    @functools.wraps(function)
    def observed(*args: Any, **settings: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **settings)
        begin(args[0] if args else next(iter(settings.values()), None))
        try:
            return function(*args, **settings)
        finally:
            end()

    return observed


def _observe(owners: tuple[Any, ...], name: str, begin: Begin, end: End = lambda: None) -> None:
    """Replace a function in its owners by one that is observed."""
    observed = _observed(getattr(owners[0], name), begin, end)
    for owner in owners:
        setattr(owner, name, observed)


def observe_fetches(begin: Callable[[], None], end: Callable[[object, object, bool], None]) -> None:
    """Observe every fetch of a batch from a `DataLoader`.

    Args:
        begin: Called before a fetch.
        end: Called after it with the iterator, the batch, and whether there was one.
    """
    kind = importlib.import_module("torch.utils.data.dataloader")._BaseDataLoaderIter
    fetch = kind.__next__

    @functools.wraps(fetch)
    def observed(self: Any) -> Any:
        begin()
        batch, is_there = None, False
        try:
            batch = fetch(self)
            is_there = True
        finally:
            end(self, batch, is_there)
        return batch

    kind.__next__ = observed


@dataclass(frozen=True)
class FetchHooks:
    """Functions that take part in the fetches of every `DataLoader`."""

    begin: Callable[[Any, Any], None]
    """Called with an iterator and its loader when a pass over the data begins."""
    index: Callable[[Any, Any], None]
    """Called with an iterator and what its sampler gave for a further batch, in the order of the batches."""
    fetch: Callable[[Any, Callable[[], Any]], Any]
    """Called with an iterator and its own fetch in the place of that; may raise StopIteration."""


def take_part_in_fetches(hooks: FetchHooks) -> None:
    """Call functions around and in the place of the fetches of every `DataLoader`."""
    kind = importlib.import_module("torch.utils.data.dataloader")._BaseDataLoaderIter
    begin, next_index, fetch, reset = kind.__init__, kind._next_index, kind.__next__, kind._reset

    @functools.wraps(begin)
    def beginning(self: Any, loader: Any, *args: Any, **settings: Any) -> None:
        begin(self, loader, *args, **settings)
        hooks.begin(self, loader)

    @functools.wraps(next_index)
    def indexing(self: Any) -> Any:
        index = next_index(self)
        hooks.index(self, index)
        return index

    @functools.wraps(fetch)
    def fetching(self: Any) -> Any:
        return hooks.fetch(self, functools.partial(fetch, self))

    @functools.wraps(reset)
    def resetting(self: Any, loader: Any, first_iter: bool = False) -> None:
        reset(self, loader, first_iter)
        if not first_iter:  # an iterator with persistent workers begins again
            hooks.begin(self, loader)

    kind.__init__, kind._next_index, kind.__next__, kind._reset = beginning, indexing, fetching, resetting


def next_index(iterator: Any) -> Any:
    """Return what the sampler of a `DataLoader`'s iterator gives for a further batch, without reading that.

    Raises:
        StopIteration: The pass has no further batch.
    """
    return iterator._next_index()


def num_workers_of(iterator: Any) -> int:
    """Return the number of worker processes of a `DataLoader`'s iterator."""
    return int(getattr(iterator, "_num_workers", 0))


def observe_backwards(begin: Begin, end: End) -> None:
    """Observe every backward, also those within one; `begin` gets the tensor, or the tensors, from which it starts."""
    _observe((torch.autograd,), "backward", begin, end)


def observe_derivatives(begin: Begin, end: End) -> None:
    """Observe every `torch.autograd.grad`."""
    _observe((torch.autograd,), "grad", begin, end)


def observe_waits(begin: Begin, end: End) -> None:
    """Observe every wait for a collective, except those that `DistributedDataParallel` starts in C++."""
    if dist.is_available():
        _observe((dist.Work,), "wait", begin, end)


def observe_saves(begin: Begin, end: End) -> None:
    """Observe every `torch.save`."""
    _observe((torch, torch.serialization), "save", begin, end)


def observe_group_ends(begin: Begin) -> None:
    """Call a function before process groups are destroyed, and their records with them."""
    if dist.is_available():
        _observe((dist, dist.distributed_c10d), "destroy_process_group", begin)


def observe_replicas(created: Begin) -> None:
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
