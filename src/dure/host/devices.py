"""Cores, memory and devices of this host. Nothing here creates a device context, so that forking stays safe."""

import os
from collections.abc import Sequence

from dure.errors import EnvironmentLacks, SpecInvalid


def count_cores() -> int:
    """Return the cores that this process may use (its affinity, where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def crowding(num_ranks: int) -> str | None:
    """Return a sentence about ranks that take turns on too few cores, or None."""
    cores = count_cores()
    if num_ranks <= cores:
        return None
    return f"{num_ranks} ranks share {cores} core{'s' * (cores > 1)}, and so take turns: fewer may be as fast"


def available_memory_bytes() -> int:
    """Return the host memory that can be taken without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)


def total_memory_bytes() -> int:
    """Return the host memory that this machine has, in use or not."""
    import psutil

    return int(psutil.virtual_memory().total)


def interface_of(address: str) -> str | None:
    """Return the network interface that has an address of this host, as gloo and NCCL want it named; None: none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return str(name)
    return None


def count_accelerators(kind: str) -> int:
    """Return the number of visible devices of a kind, `cuda` or `mps`.

    Neither question that is asked here starts the CUDA runtime, which could then not be used in a forked child:
    `torch.accelerator.is_available` would.
    """
    import torch

    # what this torch was built for; it counts CUDA devices through NVML, and by the runtime only where that is missing
    built_for = torch.accelerator.current_accelerator()
    return torch.accelerator.device_count() if built_for is not None and built_for.type == kind else 0


def resolve_device(wanted: str) -> str:
    """Return the kind of device a run uses: `cuda`, `mps` or `cpu`.

    Raises:
        EnvironmentLacks: The wanted kind is not here.
    """
    if wanted == "auto":
        return next((kind for kind in ("cuda", "mps") if count_accelerators(kind)), "cpu")
    if wanted != "cpu" and count_accelerators(wanted) == 0:
        raise EnvironmentLacks(f"--device {wanted} but this machine shows no {wanted} device: use --device cpu or auto")
    return wanted


def check_devices(device: str, num_devices: int, *, shared: bool, is_launched: bool = False) -> None:
    """Refuse more devices than the machine has.

    Args:
        device: Their kind.
        num_devices: Wanted on this host.
        shared: Whether several processes may use one.
        is_launched: Whether a launcher started the processes, which may let each see one device of its own. Ranks that
            then have the same device are found when they meet.

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
        devices: The name of each rank's, such as a GPU's UUID; None where it has none or that is not known.

    Raises:
        SpecInvalid: Two of them are the same.
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
