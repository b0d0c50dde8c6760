"""Runs the cases of Horovod's face on forked ranks: one group of processes for all cases."""

import os
import pickle
import socket
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path

import torch

from dure.torchcompat.imports import import_late_parts
from tests.compat.horovod.cases import CASES

_SECONDS = 60.0


@cache
def outcomes(num_ranks: int) -> dict[str, list[str | None]]:
    """Return, for each case, what went wrong on each rank; None for nothing."""
    import_late_parts()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        pids = [_fork(rank, num_ranks, port, Path(folder)) for rank in range(num_ranks)]
        deadline = time.monotonic() + _SECONDS
        for pid in pids:
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > deadline:
                    os.kill(pid, 9)
                time.sleep(0.01)
        found = [_read(Path(folder) / str(rank)) for rank in range(num_ranks)]
    return {name: [of_rank.get(name, "did not get there") for of_rank in found] for name in CASES}


def _read(file: Path) -> dict[str, str | None]:
    found = {}
    if file.exists():
        with file.open("rb") as stream:
            while True:
                try:
                    name, what = pickle.load(stream)
                except EOFError:
                    break
                found[name] = what
    return found


def _fork(rank: int, num_ranks: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        os.environ |= {name: str(number) for name, number in place.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
        with (folder / str(rank)).open("wb", buffering=0) as stream:
            for name, case in CASES.items():
                what = None
                try:
                    case()
                except BaseException:
                    what = traceback.format_exc()
                pickle.dump((name, what), stream)
        import dure.compat.horovod.torch as hvd

        hvd.shutdown()
    finally:
        os._exit(0)
