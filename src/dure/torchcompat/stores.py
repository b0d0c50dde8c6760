"""Stores at which ranks meet."""

import importlib
import time
from contextlib import suppress
from datetime import timedelta
from socket import socket
from typing import Any

import torch.distributed as dist

from dure.torchcompat.calls import calls_made


def store_on_socket(listener: socket, timeout: timedelta) -> dist.TCPStore:
    """Serve a store on a socket that already listens, so that its port and address are fixed.

    By itself a TCPStore listens on every interface, and a port that was free may be taken before it is used.

    Args:
        listener: A listening TCP socket. The store owns its descriptor from now on.
        timeout: Timeout of a `get` or `wait` of a missing key.
    """
    host, port = listener.getsockname()[:2]
    return dist.TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def store_at(host: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Connect to a store that another process serves.

    Raises:
        torch.distributed.DistError: Nothing responded within `timeout`.
    """
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


_left_group_at: float | None = None
_calls_when_left = -1


def left_group_at() -> float | None:
    """Return when this process left the group of all ranks, after which others' calls fail; None if it is in one.

    Only a process that has called `meet_at_served_store` knows it.
    """
    return _left_group_at


def calls_made_in_last_group() -> int:
    """Return what `calls_made` does, and after this process has left the group of all ranks, what it did then."""
    return calls_made() if dist.is_initialized() else _calls_when_left


def meet_at_served_store(host: str, port: int) -> None:
    """Make `init_process_group` in this process connect to the store at an address that is already served.

    torch has the variable `TORCHELASTIC_USE_AGENT_STORE` for that. But up to 2.13 a rank 0 that reads `True` serves no
    store at any other address either, and a script with its own address waits for it forever (2.14 compares with
    `MASTER_ADDR`, which such scripts set). With `1`, torch's Python code serves and its C++ code accepts that the port
    is taken, but logs a line, which this prevents.

    The store outlives a group that a script destroys. Its next group has keys of its own there: in those of the last
    one, a fast rank would find the closed address of a slow one, as under torchrun.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # a function has the same name
    groups: Any = dist.distributed_c10d
    create, set_default = rendezvous._create_c10d_store, groups._update_default_pg
    num_formed, is_served = 0, False

    def connect_or_create(
        hostname: str, its_port: int, rank: int, world_size: int, timeout: timedelta, *more: Any
    ) -> Any:
        nonlocal is_served
        is_served = (hostname, its_port) == (host, port)
        if not is_served:
            return create(hostname, its_port, rank, world_size, timeout, *more)
        store = dist.TCPStore(hostname, its_port, world_size, is_master=False, timeout=timeout)
        return dist.PrefixStore(f"group_{num_formed}", store) if num_formed else store

    def count_and_set_default(group: Any) -> None:
        global _left_group_at, _calls_when_left
        nonlocal num_formed, is_served
        _left_group_at = time.time() if group is None else None
        with suppress(Exception):  # a group written in Python may raise anything
            _calls_when_left = calls_made()
        num_formed += is_served and group is not None
        is_served = False
        set_default(group)

    groups._update_default_pg = count_and_set_default
    rendezvous._create_c10d_store = connect_or_create
