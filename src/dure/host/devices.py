"""Cores, memory and devices of this host. Nothing here creates a device context, so that forking stays safe."""

import os
import sys
from collections.abc import Sequence

from dure.errors import EnvironmentLacks, SpecInvalid


def count_cores() -> int:
    """Return the number of cores that this process may use (by its affinity, if the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def crowding(num_ranks: int) -> str | None:
    """Return a sentence on ranks that share too few cores, or None."""
    cores = count_cores()
    if num_ranks <= cores:
        return None
    return f"{num_ranks} ranks share {cores} core{'s' * (cores > 1)}, and so take turns: fewer may be as fast"


def available_memory_bytes() -> int:
    """Return the bytes of host memory available without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


def total_memory_bytes() -> int:
    """Return the total bytes of host memory."""
    import psutil

    return int(psutil.virtual_memory().total)


def interface_of(address: str) -> str | None:
    """Return the network interface with an address, by the name that gloo and NCCL expect; None if there is none."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return str(name)
    return None


def count_accelerators(kind: str) -> int:
    """Return the number of visible devices of a type, `cuda` or `mps`.

    The two calls here do not start the CUDA runtime, which could then not be used in a forked child;
    `torch.accelerator.is_available` would.
    """
    import torch

    # type torch was built for; CUDA devices are counted by NVML, and by the runtime only if that is missing
    built_for = torch.accelerator.current_accelerator()
    return torch.accelerator.device_count() if built_for is not None and built_for.type == kind else 0


def resolve_device(wanted: str) -> str:
    """Return the type of device that a run uses: `cuda`, `mps` or `cpu`.

    Raises:
        EnvironmentLacks: The wanted type is not available.
    """
    if wanted == "auto":
        return next((kind for kind in ("cuda", "mps") if count_accelerators(kind)), "cpu")
    if wanted != "cpu" and count_accelerators(wanted) == 0:
        raise EnvironmentLacks(f"--device {wanted} but this machine shows no {wanted} device: use --device cpu or auto")
    return wanted


def backend_name(chosen: str, device: str, *, is_one_host: bool, sends_on_cuda: bool) -> str:
    """Return torch's name of the backend of a run.

    Args:
        chosen: Backend as in the settings; `auto` for shared memory if several ranks of one host compute on its CPU.
        device: Type of the devices.
        is_one_host: Whether there are several ranks, all on one host.
        sends_on_cuda: Whether all ranks exchange tensors of their own CUDA devices.
    """
    if chosen == "auto":
        shared = "dure_shm" if device == "cpu" and is_one_host and sys.platform == "linux" else "gloo"
        chosen = "nccl" if sends_on_cuda else shared
    return "cpu:dure_shm" if chosen == "dure_shm" else chosen


def check_devices(device: str, num_devices: int, *, shared: bool, is_launched: bool = False) -> None:
    """Refuse more devices than the machine has.

    Args:
        device: Type of the devices.
        num_devices: Number of devices wanted on this host.
        shared: Whether several processes may use one device.
        is_launched: Whether a launcher started the processes, which may show each of them only its own device. Ranks
            with the same device are then found when they meet.

    Raises:
        SpecInvalid: Fewer CUDA or MPS devices are visible than the run wants.
    """
    if device == "cpu" or shared:
        return
    visible = count_accelerators(device)
    if num_devices > visible and not (is_launched and visible == 1):
        raise SpecInvalid(
            [
                f"nproc is {num_devices} but {visible} {device} device(s) are visible: use --nproc {visible}, "
                "--device cpu, or --share-devices to let several processes use one device"
            ]
        )


def check_each_has_its_own(devices: Sequence[str | None]) -> None:
    """Refuse ranks that have the same device.

    Args:
        devices: Name of each rank's device, such as a GPU's UUID; None if it has none or it is unknown.

    Raises:
        SpecInvalid: Two ranks have the same device.
    """
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(devices):
        if name is not None:
            ranks.setdefault(name, []).append(rank)
    faults = [
        f"ranks {', '.join(map(str, several))} have the same device {name}: let the launcher give each of them one, "
        "start fewer of them, or use --share-devices"
        for name, several in ranks.items()
        if len(several) > 1
    ]
    if faults:
        raise SpecInvalid(faults)
