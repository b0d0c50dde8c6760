"""Choice of an all-reduce algorithm if none is named, by the hosts of the ranks."""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from dure.comm.algorithms.base import AllReduce
from dure.comm.algorithms.opening import open_all_reduce
from dure.comm.groups import Group
from dure.errors import EnvironmentLacks, SpecInvalid

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")


def host_numbers(group: Group) -> list[int]:
    """Return the host number of every rank; ranks that can share memory have the same number.

    Communication: one gathered JSON message of about 100 bytes per rank.
    """
    names = group.all_gather_json(_host_identity())
    first: dict[str, int] = {}
    return [first.setdefault(name, len(first)) for name in names]


def _host_identity() -> str:
    """Return a name common to processes that can share memory; other containers cannot see each other's processes."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else socket.gethostname()
    return f"{boot} {os.stat(_PROCESSES).st_ino}" if _PROCESSES.exists() else boot


def open_chosen(
    wanted: str, device_type: str, group: Group, process_group: dist.ProcessGroup | None = None
) -> AllReduce:
    """Open the algorithm selected by `--comm`, on all ranks.

    Communication: one gathered JSON message, and what opening the algorithm needs.

    Args:
        wanted: `auto` or an algorithm's name.
        device_type: Type of the device of the gradients.
        group: All ranks that reduce.
        process_group: The same ranks as a torch group; None for the default group.

    Raises:
        SpecInvalid: Shared memory was requested, and the ranks have none in common.
        EnvironmentLacks: Shared memory was requested, and the system provides none.
    """
    hosts = host_numbers(group)
    name = choose_algorithm(wanted, device_type, hosts)
    try:
        return open_all_reduce(name, process_group, hosts=hosts)
    except EnvironmentLacks:  # raised on all ranks
        if wanted != "auto":
            raise
        return open_all_reduce("ring", process_group, hosts=hosts)


def choose_algorithm(wanted: str, device_type: str, hosts: Sequence[int]) -> str:
    """Return the algorithm selected by `--comm`.

    Args:
        wanted: `auto` or an algorithm's name.
        device_type: Type of the device of the gradients.
        hosts: Host number of each rank.

    Raises:
        SpecInvalid: Shared memory was requested, and the ranks have none in common.
    """
    is_shared = device_type == "cpu" and len(set(hosts)) == 1 and sys.platform == "linux"
    if wanted == "shm" and not is_shared:
        seen = f"{len(set(hosts))} hosts" if len(set(hosts)) > 1 else f"device {device_type} on {sys.platform}"
        raise SpecInvalid([f"comm is shm but this run has {seen}: shared memory reaches CPU ranks of one Linux host"])
    if wanted != "auto":
        return wanted
    if is_shared and len(hosts) > 1:
        return "shm"
    return "ring" if device_type == "cpu" else "backend"
