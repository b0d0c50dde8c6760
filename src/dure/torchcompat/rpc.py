"""Agents of `torch.distributed.rpc`."""

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from dure.torchcompat.collectives import default_store
from dure.torchcompat.imports import import_distributed_optim

_RPC_SCHEME = "dure"
_rpc_meetings: list[tuple[dist.Store, int, int]] = []
"""Store, rank and world size of the running agent."""
_registered_schemes: set[str] = set()


def start_rpc(name: str, rank: int, world_size: int, timeout_seconds: float, *, by_memory: bool = False) -> None:
    """Start this process's RPC agent over the default group's store (private in torch).

    With `by_memory`, agents of one host connect over kernel sockets without a port, and exchange bytes in unnamed
    memory. An agent that listens at a port reads a length from any client, and allocates that much memory: a port
    scanner's `GET / HTTP/1.0` aborts its process (TensorPipe in torch 2.11 to 2.13), before any Python code runs. The
    names of transports and channels are private in torch.

    `init_rpc` finds its store by a URL, and a URL can only name an address: a scheme of dure's own passes an existing
    store. Its warnings are about torch's own code (2.11 and 2.13).
    """
    from torch.distributed import rpc
    from torch.distributed.rendezvous import register_rendezvous_handler

    if _RPC_SCHEME not in _registered_schemes:
        register_rendezvous_handler(_RPC_SCHEME, _meet_for_rpc)
        _registered_schemes.add(_RPC_SCHEME)
    _rpc_meetings[:] = [(dist.PrefixStore("rpc", default_store()), rank, world_size)]
    ways: dict[str, Any] = {"_transports": ["shm"], "_channels": ["cma", "basic"]} if by_memory else {}
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"{_RPC_SCHEME}://", rpc_timeout=timeout_seconds, **ways)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)


def _meet_for_rpc(url: str, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
    yield _rpc_meetings[-1]


def stop_rpc(timeout_seconds: float) -> None:
    """Shut this process's RPC agent down together with all others, after all calls, and release the store.

    Args:
        timeout_seconds: Timeout for the others; without it the wait for a dead one would never end.
    """
    from torch.distributed import rpc

    rpc.shutdown(timeout=timeout_seconds)
    _rpc_meetings.clear()


def optimizer_of_references(optimizer_class: Callable[[list[nn.Parameter]], Any], references: list[Any]) -> Any:
    """Return a DistributedOptimizer over remote parameters.

    It logs a warning for every class that is not torch's own.

    Args:
        optimizer_class: A function of a module; called on each owner with its parameters.
        references: An RRef to each parameter.

    Communication: one remote call to each owner, blocking.
    """
    optim = import_distributed_optim()
    log = logging.getLogger("torch.distributed.optim.optimizer")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        return optim.DistributedOptimizer(optimizer_class, references)
    finally:
        log.setLevel(level)
