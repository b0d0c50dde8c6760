"""Start and end of Horovod in this process, its ranks, and what it was built with."""

import atexit
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dure.compat.horovod.engine.coordinator import Limits
from dure.compat.horovod.engine.engine import Engine, Settings
from dure.compat.horovod.engine.world import read_world
from dure.errors import Misuse

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
_NO_MPI = "there is no MPI here: ranks meet at a store and send through gloo or NCCL, so give a list of ranks"

_engine: Engine | None = None
_generation = 0
"""Number of starts in this process, which is the same on all ranks."""
on_init: list[Callable[[], None]] = []
"""Functions that reset what other modules keep of the last start."""


def engine() -> Engine:
    """Return the engine.

    Raises:
        ValueError: Horovod is not initialised.
    """
    if _engine is None:
        raise ValueError(NOT_INITIALIZED)
    return _engine


def start(ranks: Sequence[int]) -> None:
    """Start the engine of this process, unless it runs.

    Args:
        ranks: Ranks that form the world; empty for all.

    Raises:
        ValueError: This rank is not among them, or they are invalid.
        HorovodInternalError: The other ranks have not come.
    """
    global _engine, _generation
    if _engine is not None:
        if _engine.is_open:
            return
        stop()
    if len(set(ranks)) != len(ranks) or any(rank < 0 for rank in ranks):
        raise ValueError(f"comm is {list(ranks)} but must be different ranks")
    settings = settings_from(os.environ)
    world = read_world(ranks, settings.start_seconds)
    if world is None or (ranks and max(ranks) >= world.place.world_size):
        raise ValueError(f"comm is {list(ranks)}, to which this rank does not belong or which are not all there")
    _generation += 1
    for reset in on_init:
        reset()
    _engine = Engine(world, settings, _generation)
    timeline = os.environ.get("HOROVOD_TIMELINE", "")
    if timeline and timeline.upper() != "DYNAMIC":
        _engine.start_timeline(timeline, marks_cycles=_is_on("HOROVOD_TIMELINE_MARK_CYCLES"))


def stop() -> None:
    """End the engine of this process, and the collectives of all ranks."""
    global _engine
    ended, _engine = _engine, None
    if ended is not None:
        ended.shutdown()


def _forget() -> None:
    global _engine, _generation
    ended, _engine, _generation = _engine, None, 0
    if ended is not None:
        ended.forget()


atexit.register(stop)
os.register_at_fork(after_in_child=_forget)


def _is_on(name: str) -> bool:
    return os.environ.get(name, "0").strip().lower() not in ("", "0", "false")


def settings_from(environ: "os._Environ[str] | dict[str, str]") -> Settings:
    """Return the settings that Horovod's variables describe.

    Raises:
        Misuse: One is not a number of at least 0.
    """

    def number(name: str, default: float) -> float:
        text = environ.get(name, "").strip()
        try:
            value = float(text) if text else default
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise Misuse(f"{name} is {text!r} but must be a number of at least 0")
        return value

    no_stalls = environ.get("HOROVOD_STALL_CHECK_DISABLE", "0").strip() not in ("", "0")
    return Settings(
        limits=Limits(
            fusion_bytes=int(number("HOROVOD_FUSION_THRESHOLD", 64 * 2**20)),
            stall_seconds=0.0 if no_stalls else number("HOROVOD_STALL_CHECK_TIME_SECONDS", 60),
            shutdown_seconds=0.0 if no_stalls else number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0),
        ),
        cycle_seconds=number("HOROVOD_CYCLE_TIME", 1.0) / 1000,
        cache_capacity=int(number("HOROVOD_CACHE_CAPACITY", 1024)),
        start_seconds=number("HOROVOD_START_TIMEOUT", 600) or 600,
        timeout_seconds=number("HOROVOD_GLOO_TIMEOUT_SECONDS", 300) or 300,
    )


def ranks_of(comm: Any) -> list[int]:
    """Return the ranks that `init` got; an MPI communicator is refused.

    Raises:
        ValueError: It is no list of ranks.
    """
    if comm is None:
        return []
    if not isinstance(comm, Iterable):
        raise ValueError(f"comm is a {type(comm).__name__}, but {_NO_MPI}")
    ranks = list(comm)
    if any(not isinstance(rank, int) for rank in ranks):
        raise ValueError(f"comm is {ranks} but must be a list of ranks")
    return ranks


# --- the script's position


def is_initialized() -> bool:
    """Return whether `init` has been called, and `shutdown` has not."""
    return _engine is not None


def rank() -> int:
    """Return the rank of this process among all."""
    return engine().world.rank


def size() -> int:
    """Return the number of ranks."""
    return engine().world.size


def local_rank() -> int:
    """Return the rank of this process among those of its host."""
    return int(engine().places[rank()]["local_rank"])


def local_size() -> int:
    """Return the number of ranks on this host."""
    return int(engine().places[rank()]["local_size"])


def cross_rank() -> int:
    """Return the rank of this process's host among those that have its local rank."""
    own = engine().places[rank()]
    same = [place for place in engine().places if place["local_rank"] == own["local_rank"]]
    return same.index(own)


def cross_size() -> int:
    """Return the number of hosts that have this process's local rank."""
    own = engine().places[rank()]
    return sum(place["local_rank"] == own["local_rank"] for place in engine().places)


def is_homogeneous() -> bool:
    """Return whether every host has as many ranks."""
    return len({place["local_size"] for place in engine().places}) == 1


# --- builds, of which there is none here


def mpi_threads_supported() -> bool:
    """Refuse: MPI is not used.

    Raises:
        ValueError: Always, as Horovod does without MPI.
    """
    raise ValueError("Horovod MPI is not enabled; ranks meet at a store, so nothing here needs it.")


def mpi_enabled() -> bool:
    """Return False: MPI is not used."""
    return False


def mpi_built() -> bool:
    """Return False: MPI is not used."""
    return False


def gloo_enabled() -> bool:
    """Return whether torch has gloo."""
    return dist.is_gloo_available()


def gloo_built() -> bool:
    """Return whether torch has gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """Return the number of NCCL's version in torch, such as 22705, or 0."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]
    return int(major * 10000 + minor * 100 + patch)


def ddl_built() -> bool:
    """Return False: IBM's DDL is not used."""
    return False


def ccl_built() -> bool:
    """Return False: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """Return whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Return whether torch was built with ROCm."""
    return torch.version.hip is not None


# --- the timeline


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to record a timeline, a Chrome trace, on rank 0.

    Args:
        file_path: Path of the file.
        mark_cycles: Whether cycles of the background thread are marked.

    Raises:
        ValueError: Horovod is not initialised.
    """
    engine().start_timeline(file_path, marks_cycles=mark_cycles)


def stop_timeline() -> None:
    """Complete the timeline.

    Raises:
        ValueError: Horovod is not initialised.
    """
    engine().stop_timeline()
