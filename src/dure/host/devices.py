"""Cores, memory and devices of this host. Nothing here creates a device context, so that forking stays safe."""

import os
from collections.abc import Sequence

from dure.errors import EnvironmentLacks, SpecInvalid
from dure.host.backends import OVER_SOCKETS, reaches
from dure.host.device_kinds import HOST, count_of_torch, device_kind, known_kinds


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


def accelerator() -> str | None:
    """Return the kind of accelerator that this torch was built or extended for; None if it knows the CPU only."""
    import torch

    built_for = torch.accelerator.current_accelerator()
    return None if built_for is None else built_for.type


def count_accelerators(kind: str) -> int:
    """Return the number of visible devices of a kind of accelerator.

    This starts no runtime, which could then not be used in a forked child; `torch.accelerator.is_available` would.
    """
    return count_of_torch(kind) if kind == accelerator() else 0


def count_all_accelerators() -> int:
    """Return the number of visible devices of torch's accelerator, of whichever kind they are."""
    kind = accelerator()
    return 0 if kind is None else count_accelerators(kind)


def resolve_device(wanted: str) -> str:
    """Return the kind of device that a run uses: `cpu`, or torch's accelerator.

    Raises:
        SpecInvalid: torch knows no such kind.
        EnvironmentLacks: No device of the wanted kind is visible.
    """
    here = accelerator()
    if wanted == "auto":
        return here if here is not None and count_accelerators(here) else HOST
    if wanted not in known_kinds():
        raise SpecInvalid([unknown_kind(wanted)])
    if wanted != HOST and count_accelerators(wanted) == 0:
        raise EnvironmentLacks(f"--device {wanted} but {_seen_instead(wanted)}: use --device {_here()}")
    return wanted


def unknown_kind(wanted: str) -> str:
    """Return a sentence about a kind of device that torch does not know, with what may be asked for here."""
    kind, is_one, index = wanted.partition(":")
    if is_one and kind in known_kinds() and index.isdecimal():
        chosen = device_kind(kind).visible
        how = f", and choose devices with {chosen}" if chosen else ""
        return f"device is {wanted!r} but must be a kind, without a number: use --device {kind}{how}"
    return (
        f"device is {wanted!r} but torch knows no accelerator of this name here: use --device {_here()} (a package "
        "that brings devices of its own has to be installed in this environment)"
    )


def _here() -> str:
    kind = accelerator()
    is_there = kind is not None and count_accelerators(kind)
    return f"{kind}, cpu or auto" if is_there else "cpu or auto"


def _seen_instead(wanted: str) -> str:
    """Return why torch shows no device of a kind that it has a name for."""
    kind = accelerator()
    if kind == wanted:
        return f"this machine shows no {wanted} device"
    built = "for the CPU only" if kind is None else f"for {kind}"
    return f"this machine shows no {wanted} device, and this torch is built {built}"


def check_devices(device: str, num_devices: int, *, shared: bool, is_launched: bool = False) -> None:
    """Refuse more devices than the machine has.

    Args:
        device: Kind of the devices.
        num_devices: Number of devices wanted on this host.
        shared: Whether several processes may use one device.
        is_launched: Whether a launcher started the processes, which may show each of them only its own device. Ranks
            with the same device are then found when they meet.

    Raises:
        SpecInvalid: Fewer devices are visible than the run wants.
    """
    if device == HOST or shared:
        return
    visible = count_accelerators(device)
    if num_devices > visible and not (is_launched and visible == 1):
        # ranks that share devices talk over sockets
        may_share = reaches(OVER_SOCKETS, device)
        cures = f"--device cpu{', or --share-devices to let several processes use one device' if may_share else ''}"
        fewer = f"--nproc {visible}{',' if may_share else ' or'} "
        raise SpecInvalid([f"nproc is {num_devices} but {visible} {device} device(s) are visible: use {fewer}{cures}"])


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
