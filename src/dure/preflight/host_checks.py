"""Checks of one host, apart from its GPUs."""

from collections.abc import Sequence

from dure.host.backends import device_backend
from dure.preflight.findings import Finding, failure, ok, warning
from dure.preflight.gpu_checks import gpu_checks
from dure.preflight.host_facts import HostFacts
from dure.preflight.settings import PreflightSettings
from dure.units import format_bytes, format_count

_FILES_OF_RANK, _FILES_PER_PEER, _FILES_INHERITED = 64, 4, 4
"""Numbers of open files, from measurements. A rank has 26, its launcher's 4 for each rank started before it, and for
each peer 1 in each group of gloo, of which a strategy may create several.
"""
_FILES_PER_NCCL_PEER = 16
"""Sockets of several channels; not measured, but assumed to be enough."""
_FILES_OF_LAUNCHER, _FILES_PER_CHILD = 64, 12
"""Numbers of open files, from measurements: 8, and 4 for each rank; pipes and log files of `dure run` make it 9."""
_FILES_PER_LOADER = 128
"""Open files of a loader process, which passes each tensor in its queue as one."""
_PORTS_TO_SPARE = 256
_LOADER_BYTES = 64 * 2**20
"""Memory in bytes for two prefetched batches of a few MiB; the true size cannot be known beforehand."""
_DOCKER_BYTES = 64 * 2**20
"""Default bytes of `/dev/shm` in a container."""
_RANK_MEMORY_BYTES = 2**30
_SMALL_DISK_BYTES, _LEAST_DISK_BYTES = 2**30, 16 * 2**20
_SLOW_WRITE_SECONDS = 1.0
_LEAST_MTU = 1280
_SLOW_LOOKUP_SECONDS = 1.0


def host_checks(facts: HostFacts, settings: PreflightSettings, world_size: int) -> list[Finding]:
    """Judge one host.

    Args:
        facts: Facts about the host.
        settings: The planned run.
        world_size: Ranks on all hosts.
    """
    return [
        _open_files(facts, settings, world_size),
        *_shared_memory(facts, settings),
        *_disk(facts),
        *_memory_and_cores(facts, settings),
        _ports(facts, world_size),
        *_interface(facts, settings),
        *gpu_checks(facts, share_devices=settings.share_devices),
    ]


def _open_files(facts: HostFacts, settings: PreflightSettings, world_size: int) -> Finding:
    per_peer = _FILES_PER_NCCL_PEER if device_backend(facts.device) is not None else _FILES_PER_PEER
    rank = _FILES_OF_RANK + _FILES_INHERITED * facts.num_ranks + per_peer * world_size
    rank += _FILES_PER_LOADER * settings.num_workers
    launcher = _FILES_OF_LAUNCHER + _FILES_PER_CHILD * facts.num_ranks
    needed, limit = max(rank, launcher), facts.open_files
    if limit >= needed:
        return ok("open files", f"{_many(limit)} in each process, about {needed} needed")
    if facts.most_open_files >= needed:
        cure = f"`ulimit -n {max(needed, min(facts.most_open_files, 65536))}` in the shell that starts it"
    else:
        cure = (
            f"the hard limit is {_many(facts.most_open_files)}: raise it in /etc/security/limits.conf, with "
            "LimitNOFILE= of the service, or `docker run --ulimit nofile=65536`"
        )
    return failure("open files", f"a process may have {limit} files open", f"this run needs about {needed}", cure)


def _many(limit: int) -> str:
    return "any number" if limit >= 2**31 else f"{limit:,}"


def _shared_memory(facts: HostFacts, settings: PreflightSettings) -> list[Finding]:
    """Judge `/dev/shm`, which loader workers and NCCL use; memory that dure shares between ranks has no name there."""
    name, room = "/dev/shm", facts.shared_memory  # noqa: S108
    cure = "mount it (`mount -t tmpfs -o size=50% tmpfs /dev/shm`), or give the container --shm-size=8g or --ipc=host"
    users = [
        *(["loader workers"] if settings.num_workers else []),
        *(["NCCL"] if device_backend(facts.device) == "nccl" and facts.num_ranks > 1 else []),
    ]
    if room.error is not None:
        seen = f"nothing can be written to {name} ({room.error})"
        if users:
            return [failure(name, seen, f"{' and '.join(users)} pass data through it", cure)]
        return [warning(name, seen, "loader workers (--num-workers) and NCCL pass data through it", cure)]
    needed = _DOCKER_BYTES + _LOADER_BYTES * settings.num_workers * facts.num_ranks
    seen = f"{format_bytes(room.free_bytes)} of {format_bytes(room.total_bytes)} free"
    if room.total_bytes <= _DOCKER_BYTES:
        rule = "that is what a container gets by default, and too little for loader workers and for NCCL"
        return [warning(name, seen, rule, "start the container with --shm-size=8g or --ipc=host")]
    if room.free_bytes < needed:
        return [
            warning(
                name, seen, f"loader workers and NCCL may want {format_bytes(needed)}", f"see what is in it, or {cure}"
            )
        ]
    return [ok(name, seen)]


def _disk(facts: HostFacts) -> list[Finding]:
    name, room = "disk", facts.runs
    if room.error is not None:
        full = " (it is full)" if room.total_bytes and not room.free_bytes else ""
        return [
            failure(
                name,
                f"nothing can be written to {room.path}: {room.error}{full}",
                "a run keeps its records and checkpoints there",
                "free some room, mend its permissions, or name another --runs-dir",
            )
        ]
    seen = f"{format_bytes(room.free_bytes)} free in {room.path}"
    if room.free_bytes < _SMALL_DISK_BYTES:
        judged = failure if room.free_bytes < _LEAST_DISK_BYTES else warning
        rule = "a checkpoint takes three times the model's bytes under Adam, and two are kept beside the best"
        return [judged(name, seen, rule, "free some room, or name another --runs-dir")]
    if room.write_seconds is not None and room.write_seconds > _SLOW_WRITE_SECONDS:
        rule = f"one small write took {room.write_seconds:.1f} s until it was safe, and each record and checkpoint does"
        return [warning(name, seen, rule, "take a faster or less busy disk for --runs-dir")]
    return [ok(name, f"{seen}, a safe write takes {1000 * (room.write_seconds or 0):.1f} ms")]


def _memory_and_cores(facts: HostFacts, settings: PreflightSettings) -> list[Finding]:
    found = []
    each = facts.available_memory_bytes / facts.num_ranks
    if each < _RANK_MEMORY_BYTES:
        found.append(
            warning(
                "memory",
                f"{format_bytes(facts.available_memory_bytes)} are available to {facts.num_ranks} rank(s)",
                f"a rank takes {format_bytes(_RANK_MEMORY_BYTES)} before it has a model",
                "use a smaller --nproc, or raise the memory limit of the container",
            )
        )
    else:
        found.append(ok("memory", f"{format_bytes(each)} available to each rank"))
    wanted, cores = facts.num_ranks * facts.threads, facts.cores
    demand = f"{facts.num_ranks} rank(s) of {facts.threads} thread(s)"
    quota = facts.cpu_quota
    if quota is not None and quota < min(wanted, cores):
        fitting = max(1, int(quota) // facts.num_ranks)
        cure = f"use --threads {fitting}" if fitting < facts.threads else "use a smaller --nproc"
        seen = f"the container may use {quota:g} cores at a time, of {cores}"
        found.append(
            warning("cores", seen, f"{demand} want {wanted}, and are held up in turns", f"{cure}, or raise it")
        )
    elif wanted > cores:
        fitting = cores // facts.num_ranks
        cure = f"use --threads {fitting}" if fitting else f"use --nproc {cores}, if devices are not what counts"
        found.append(warning("cores", f"{cores} cores are here", f"{demand} want {wanted}, and take turns", cure))
    else:
        found.append(ok("cores", f"{demand} on {cores} cores"))
    return found


def _ports(facts: HostFacts, world_size: int) -> Finding:
    ports = facts.ports
    num_all = ports.last - ports.first + 1
    needed = facts.num_ranks * world_size + _PORTS_TO_SPARE
    seen = f"{num_all - ports.num_used} of {num_all} ports ({ports.first} to {ports.last}) are free on {facts.address}"
    cure = "widen the range (`sysctl net.ipv4.ip_local_port_range='32768 60999'`), or see who holds them with `ss -tan`"
    if ports.error is not None:
        return failure("ports", f"{seen}, and none could be had: {ports.error}", "ranks listen on free ports", cure)
    if num_all - ports.num_used < needed:
        return warning("ports", seen, f"{world_size} ranks and their connections may take {needed}", cure)
    return ok("ports", seen)


def _interface(facts: HostFacts, settings: PreflightSettings) -> Sequence[Finding]:
    found, several = facts.interface, settings.num_nodes > 1
    if found is None:
        return [
            failure(
                "interface",
                f"no network interface of this host has the address {facts.address}",
                "gloo and NCCL are told one by name",
                "look at `ip address`; in a container use the host's network or one that reaches the others",
            )
        ]
    if not found.is_up:
        cure = f"`ip link set {found.name} up`"
        # if nodes have met on it, it works, whatever its driver reports
        judged = warning if several else failure
        return [judged("interface", f"{found.name} is down", "ranks meet on it", cure)]
    if several and found.is_loopback:
        return [
            warning(
                "interface",
                f"{facts.address} is on {found.name}, which leads to this very host",
                "other machines cannot be reached there",
                "give node 0's address in the network as --rendezvous, unless all nodes are processes of this host",
            )
        ]
    if facts.lookup_seconds > _SLOW_LOOKUP_SECONDS:
        return [
            warning(
                "interface",
                f"asking for the name of node 0's address took {facts.lookup_seconds:.1f} s",
                "torch asks so for each connection of its store, and all ranks wait",
                "put the hosts of the run into /etc/hosts, or mend the name server (/etc/resolv.conf)",
            )
        ]
    if found.mtu < _LEAST_MTU:
        cure = f"`ip link set {found.name} mtu 1500`"
        return [warning("interface", f"{found.name} has an MTU of {found.mtu}", "every packet costs time", cure)]
    speed = f", {format_count(1e6 * found.megabits_per_second)}bit/s" if found.megabits_per_second else ""
    where = "" if several else ", all ranks are of this host"
    return [ok("interface", f"{found.name} is up, MTU {found.mtu}{speed}{where}")]
