"""Calls that a script makes of torch, observed from outside; they return what they would without it (private in torch).

Each observer receives what it needs to time a call, and an error in it is an error of the call: observers never raise.
"""

import functools
import importlib
from collections.abc import Callable
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
