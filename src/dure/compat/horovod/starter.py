"""`horovod.run`: a function on several forked ranks of this host."""

import os
import pickle
import socket
import traceback
from collections.abc import Callable, Sequence
from typing import Any

_LOCAL = ("localhost", "127.0.0.1")


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    np: int = 1,
    hosts: str | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    verbose: int | None = None,
) -> list[Any]:
    """Run a function on ranks of this host, and return its results by rank.

    Args:
        func: Function, which calls `hvd.init()`.
        args: Its arguments.
        kwargs: Its arguments by name.
        np: Number of ranks.
        hosts: This host alone, or None.
        use_gloo: Ignored: there is nothing else.
        use_mpi: False or None.
        verbose: Ignored.

    Raises:
        ValueError: Another host, MPI or no rank is asked for.
        RuntimeError: A rank has failed.
    """
    if use_mpi:
        raise ValueError("there is no MPI here: leave use_mpi out")
    names = [host.partition(":")[0] for host in (hosts or "localhost").split(",")]
    if any(name not in (*_LOCAL, os.uname().nodename) for name in names):
        raise ValueError(f"hosts is {hosts!r}, but ranks are started on this host alone: use `dure run --nnodes`")
    if np < 1:
        raise ValueError(f"np is {np} but must be at least 1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    ranks = [_fork(rank, np, port, func, args, kwargs or {}) for rank in range(np)]
    results: list[Any] = []
    faults: list[str] = []
    for rank, (pid, reader) in enumerate(ranks):
        with os.fdopen(reader, "rb") as stream:
            data = stream.read()
        os.waitpid(pid, 0)
        # written by a process that this one has forked
        is_done, result = pickle.loads(data) if data else (False, "it died")  # noqa: S301
        (results if is_done else faults).append(result if is_done else f"rank {rank} failed: {result}")
    if faults:
        raise RuntimeError("\n".join(faults))
    return results


def _fork(
    rank: int, size: int, port: int, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    os.close(reader)
    try:
        place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
        os.environ.update({name: str(number) for name, number in place.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # a launcher of this process serves no store at this port
        try:
            answer = pickle.dumps((True, func(*args, **kwargs)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        from dure.compat.horovod.common.basics import stop

        stop()
        with os.fdopen(writer, "wb") as stream:
            stream.write(answer)
    finally:
        os._exit(0)
