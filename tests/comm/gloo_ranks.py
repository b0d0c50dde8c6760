"""Runs a function on forked ranks."""

import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dure.cluster.rank import RankInfo
from dure.comm.groups import ProcessGroup, open_group
from dure.process.context import StoreAddress
from dure.torchcompat.imports import import_late_parts


def on_ranks(
    num_ranks: int, work: Callable[[ProcessGroup], Any], timeout_seconds: float = 20.0, backend: str = "gloo"
) -> list[Any]:
    """Return what `work(group)` returned on each rank: an exception as its object, None for one that died."""
    import_late_parts()
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        pids = [
            _fork(rank, num_ranks, work, listener, Path(folder), timeout_seconds, backend) for rank in range(num_ranks)
        ]
        for pid in pids:
            os.waitpid(pid, 0)
        files = [Path(folder) / str(rank) for rank in range(num_ranks)]
        return [pickle.loads(file.read_bytes()) if file.exists() else None for file in files]


def _fork(
    rank: int, num_ranks: int, work: Callable[[ProcessGroup], Any], listener: socket.socket, folder: Path,
    timeout_seconds: float, backend: str,
) -> int:  # fmt: skip
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        host, port = listener.getsockname()
        place = RankInfo(rank=rank, local_rank=rank, world_size=num_ranks, local_world_size=num_ranks)
        address = StoreAddress(host=host, port=port, prefix="test", listen_fd=listener.detach() if rank == 0 else None)
        group = open_group(place, address, device=torch.device("cpu"), backend=backend, timeout_seconds=timeout_seconds)
        try:
            answer = work(group)
            group.close()
        except Exception as error:
            answer = error
            traceback.print_exc()
        (folder / str(rank)).write_bytes(pickle.dumps(answer))
    finally:
        os._exit(0)
