"""World of this process: its rank among all ranks, and the store at which they meet."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from dure.cluster.rank import MeetingPoint, RankInfo, meeting_point, read_launcher
from dure.comm.meeting import address_here
from dure.torchcompat.collectives import default_store
from dure.torchcompat.stores import store_at

_STORE_SECONDS = 600.0
_POLL_SECONDS = 0.005


@dataclass(frozen=True, kw_only=True)
class World:
    """Position of this process, in Horovod's terms, and the means to meet the others."""

    rank: int = 0
    size: int = 1
    place: RankInfo
    """Position that the launcher gave."""
    store: dist.Store | None = None
    """Store of this start of the ranks; None for one rank."""
    host: str = "127.0.0.1"
    """Address at which rank 0 can listen for the other ranks."""

    @property
    def is_one_host(self) -> bool:
        """Return whether all ranks are on this host."""
        return self.place.is_one_host


_stores: dict[tuple[str, int], dist.Store] = {}
"""Stores of this process, which live as long as it does: other ranks may still be leaving."""


def read_world(ranks: Sequence[int] = (), seconds: float = _STORE_SECONDS) -> World | None:
    """Return the world that the environment describes, or a part of it.

    torchrun, `dure run`, Slurm, Open MPI and others are understood (docs/clusters.md). Without any of them, the world
    is that of the default process group if there is one, or this process alone.

    Args:
        ranks: Global ranks that form the world; empty for all.
        seconds: Maximum wait for the store.

    Returns:
        The world; None if this rank is not among `ranks`.
    """
    environ = _completed(os.environ)
    launched = read_launcher(environ)
    store: dist.Store | None = None
    host = "127.0.0.1"
    if launched is not None:
        place = launched.rank
        if place.world_size > 1:
            point = meeting_point(launched, environ)
            store = dist.PrefixStore(_prefix(), _connect(place, point, seconds))
            host = address_here(place, point) if place.rank == (min(ranks) if ranks else 0) else ""
    elif dist.is_initialized() and dist.get_world_size() > 1:
        rank, size = dist.get_rank(), dist.get_world_size()
        place = RankInfo(rank=rank, local_rank=rank, world_size=size, local_world_size=size)
        store = dist.PrefixStore("horovod", default_store())
    else:
        place = RankInfo()
    if not ranks:
        return World(rank=place.rank, size=place.world_size, place=place, store=store, host=host)
    if place.rank not in ranks:
        return None
    if store is not None:
        store = dist.PrefixStore("of " + ",".join(map(str, ranks)), store)
    return World(rank=sorted(ranks).index(place.rank), size=len(ranks), place=place, store=store, host=host)


def _completed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with torchrun's variables where only some are set, or only horovodrun's.

    A program that starts ranks by itself often sets RANK, WORLD_SIZE and the address alone: all are on one host then.
    """
    found = {**environ}
    for own, name in (("RANK", "HOROVOD_RANK"), ("WORLD_SIZE", "HOROVOD_SIZE")):
        if name in environ:
            found.setdefault(own, environ[name])
    if not (found.get("RANK", "").isdecimal() and found.get("WORLD_SIZE", "").isdecimal()):
        return {**environ}
    found.setdefault("LOCAL_WORLD_SIZE", environ.get("HOROVOD_LOCAL_SIZE", found["WORLD_SIZE"]))
    if found["LOCAL_WORLD_SIZE"].isdecimal() and int(found["LOCAL_WORLD_SIZE"]):
        node, local = divmod(int(found["RANK"]), int(found["LOCAL_WORLD_SIZE"]))
        found.setdefault("LOCAL_RANK", environ.get("HOROVOD_LOCAL_RANK", str(local)))
        found.setdefault("GROUP_RANK", environ.get("HOROVOD_CROSS_RANK", str(node)))
    return found


def wait_for(store: dist.Store, key: str, seconds: float) -> bytes:
    """Return a key's value. Python handles no signals during the store's own wait, so this one sleeps.

    Raises:
        TimeoutError: It was not set in time.
    """
    deadline = time.monotonic() + seconds
    pause = _POLL_SECONDS
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s in vain for rank 0")
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return store.get(key)


def _prefix() -> str:
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"horovod/{run}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _connect(place: RankInfo, point: MeetingPoint, seconds: float) -> dist.Store:
    """Connect to the launcher's store, or to that of rank 0, which may also be a script's own."""
    key = (point.host, point.port)
    if key in _stores:
        return _stores[key]
    timeout = timedelta(seconds=seconds)
    if place.rank == 0 and not point.is_served:
        # `multi_tenant`: a script's own init_process_group at the same address gets this store
        address = "127.0.0.1" if place.is_one_host and point.host in ("localhost", "127.0.0.1") else point.host
        listener = socket.create_server((address, point.port))
        store: dist.Store = dist.TCPStore(
            point.host, point.port, None, True, timeout, False, multi_tenant=True, master_listen_fd=listener.detach()
        )
    else:
        store = store_at(point.host, point.port, timeout)
    _stores[key] = store
    return store
