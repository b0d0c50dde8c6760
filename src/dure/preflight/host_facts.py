"""Facts about one host, from queries and trials, judged elsewhere: plain values, which are sent as JSON."""

import errno
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dure.host.cgroups import groups_of
from dure.host.devices import available_memory_bytes, count_cores
from dure.host.environment import LOOPBACK
from dure.host.nvml import GpuFacts, gpu_facts
from dure.preflight.settings import PreflightSettings

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
_NO_LIMIT_BYTES = 2**60
"""Threshold for unlimited memory: version 1 of cgroups writes nearly 2**63 if there is no limit."""
_MOST_TRIED_PORTS = 64
_WRITTEN_BYTES = 4096
_DISK_PATIENCE_SECONDS = 15.0
_LINK_SECONDS = 1.5
"""Seconds to wait for a link: a new interface counts as down until the kernel's next check, once a second."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Folder in which files are written."""

    path: str
    total_bytes: int = 0
    free_bytes: int = 0
    error: str | None = None
    """Reason why nothing can be written there; None if it can."""
    write_seconds: float | None = None
    """Seconds until one small write was safe from a loss of power."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """Network interface."""

    name: str
    is_up: bool
    mtu: int
    is_loopback: bool = False
    megabits_per_second: int = 0
    """Speed of the link; 0 if the driver does not report it."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """TCP ports that the kernel assigns to programs that request any."""

    first: int
    last: int
    num_used: int
    error: str | None = None
    """Reason why none was available; None otherwise."""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """Facts about one host."""

    node_rank: int
    host: str
    address: str
    versions: dict[str, str | None]
    """Version of each software by its name; None if it is not installed."""
    device: str
    num_devices: int
    visible_devices: int
    num_ranks: int
    cores: int
    cpu_quota: float | None
    """Number of cores that the container may use at a time; None if there is no limit."""
    threads: int
    available_memory_bytes: int
    open_files: int
    """Maximum open files of a process at its start."""
    most_open_files: int
    """Limit up to which a process may raise that number itself."""
    ports: Ports
    interface: Interface | None
    lookup_seconds: float
    """Seconds of the look-up of node 0's address."""
    shared_memory: Space
    runs: Space
    gpus: GpuFacts


def host_facts(
    settings: PreflightSettings,
    *,
    node_rank: int = 0,
    address: str = "127.0.0.1",
    interface: str | None = None,
    first_address: str = "127.0.0.1",
) -> HostFacts:
    """Collect the facts about this host.

    Args:
        settings: The planned run.
        node_rank: Node rank of this host.
        address: Address at which the others reach it.
        interface: Network interface with this address.
        first_address: Address of node 0.
    """
    from dure.host.devices import count_accelerators

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    gpus = gpu_facts()
    return HostFacts(
        node_rank=node_rank,
        host=socket.gethostname(),
        address=address,
        versions=_versions(gpus),
        device=settings.device,
        num_devices=settings.num_devices,
        visible_devices=count_accelerators(settings.device),
        num_ranks=settings.num_ranks,
        cores=count_cores(),
        cpu_quota=cpu_quota(),
        threads=settings.threads or max(1, count_cores() // settings.num_ranks),
        available_memory_bytes=min(available_memory_bytes(), _left_in_cgroup()),
        open_files=_finite(soft),
        most_open_files=_finite(hard),
        ports=_ports(address, settings.num_ranks),
        interface=_interface(interface or LOOPBACK),
        lookup_seconds=_lookup_seconds(first_address),
        shared_memory=_space(SHARED_MEMORY) if sys.platform == "linux" else Space(path="", error="no such thing here"),
        runs=_durable_space(settings.runs_dir),
        gpus=gpus,
    )


def _versions(gpus: GpuFacts) -> dict[str, str | None]:
    import torch

    from dure.host.device_kinds import versions

    try:
        own = importlib.metadata.version("dure")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed, only on the path"
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "dure": own,
        **versions(),
        "NVIDIA driver": gpus.driver,
    }


# --- limits


def _finite(limit: int) -> int:
    return 2**31 if limit == resource.RLIM_INFINITY else limit


def cpu_quota() -> float | None:
    """Return the number of cores' worth of time that the cgroups of this process permit, or None."""
    quotas = []
    for folder in groups_of("cpu"):
        with suppress(OSError, ValueError):
            quota, _, period = (folder / "cpu.max").read_text().strip().partition(" ")
            quotas += [] if quota == "max" else [int(quota) / int(period)]
        with suppress(OSError, ValueError):
            micros = int((folder / "cpu.cfs_quota_us").read_text())
            quotas += [] if micros <= 0 else [micros / int((folder / "cpu.cfs_period_us").read_text())]
    return min(quotas, default=None)


def _left_in_cgroup() -> int:
    """Return the memory that the cgroups of this process still permit; cached files are reclaimed and do not count."""
    left = [_NO_LIMIT_BYTES]
    for folder in groups_of("memory"):
        for limit, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with suppress(OSError, ValueError):
                most = int((folder / limit).read_text())
                stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                left.append(most - int((folder / used).read_text()) + int(stats.get(cached, 0)))
    return max(0, min(left))


# --- network


def _interface(name: str) -> Interface | None:
    import psutil

    deadline = time.monotonic() + _LINK_SECONDS
    while True:
        found = psutil.net_if_stats().get(name)
        if found is None:
            return None
        if found.isup or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return Interface(
        name=name,
        is_up=bool(found.isup),
        mtu=int(found.mtu),
        is_loopback=name == LOOPBACK,
        megabits_per_second=int(found.speed),
    )


def _ports(address: str, num_ranks: int) -> Ports:
    """Take as many ports as ranks need at the start, all at once, and release them."""
    error = None
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with ExitStack() as taken:
        for _ in range(min(2 * num_ranks + 2, _MOST_TRIED_PORTS)):
            try:
                taken.enter_context(socket.create_server((address, 0), family=family))
            except OSError as refused:
                error = refused.strerror or str(refused)
                break
    first, last = _port_range()
    return Ports(first=first, last=last, num_used=_num_used(first, last), error=error)


def _port_range() -> tuple[int, int]:
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return 49152, 65535  # the range of RFC 6335


def _num_used(first: int, last: int) -> int:
    used = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError, ValueError, IndexError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                used.add(int(line.split()[1].rpartition(":")[2], 16))
    return sum(first <= port <= last for port in used)


def _lookup_seconds(address: str) -> float:
    """Return the seconds of a reverse look-up, which torch's store makes for each address without need."""
    began = time.perf_counter()
    with suppress(OSError):
        socket.getnameinfo((address, 0), 0)
    return time.perf_counter() - began


# --- folders


def existing_part(path: Path) -> Path:
    """Return the folder, or its nearest existing parent: the rest would be created."""
    path = path.absolute()
    return next(part for part in (path, *path.parents) if part.exists())


def _space(folder: Path) -> Space:
    try:
        room = shutil.disk_usage(folder)
    except OSError as error:
        return Space(path=str(folder), error=error.strerror)
    wrote: dict[str, Any] = {}
    try:
        wrote["write_seconds"] = _written(folder)
    except OSError as error:
        wrote["error"] = _worded(error)
    return Space(path=str(folder), total_bytes=room.total, free_bytes=room.free, **wrote)


def _durable_space(runs_dir: Path) -> Space:
    """Examine the runs folder in a thread: a network file system whose server is gone never responds."""
    found: list[Space] = []

    def look() -> None:
        try:
            folder = existing_part(runs_dir.expanduser()).resolve()
            is_folder = folder.is_dir()
        except (OSError, RuntimeError) as error:
            found.append(Space(path=str(runs_dir), error=str(error)))
            return
        found.append(_space(folder) if is_folder else Space(path=str(folder), error="it is a file and no folder"))

    looking = threading.Thread(target=look, name="preflight disk", daemon=True)
    looking.start()
    looking.join(_DISK_PATIENCE_SECONDS)
    if found:
        return found[0]
    return Space(path=str(runs_dir), error=f"it did not answer within {_DISK_PATIENCE_SECONDS:g} s")


def _written(folder: Path) -> float:
    """Write a small file so that it would survive a loss of power, remove it, and return the seconds."""
    descriptor, name = tempfile.mkstemp(prefix=".dure-preflight-", dir=folder)
    try:
        began = time.perf_counter()
        left = memoryview(bytes(_WRITTEN_BYTES))
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
        return time.perf_counter() - began
    finally:
        os.close(descriptor)
        os.unlink(name)


def _worded(error: OSError) -> str:
    if error.errno == errno.EINVAL:
        return "this file system does not make writes durable (fsync)"
    return error.strerror or str(error)
