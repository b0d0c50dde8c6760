"""A host on which all is well, for tests to change one thing of."""

from dataclasses import replace
from typing import Any

from dure.host.nvml import GpuFacts
from dure.preflight.findings import Finding
from dure.preflight.host_facts import HostFacts, Interface, Ports, Space
from dure.preflight.settings import PreflightSettings

GIB = 2**30
SETTINGS = PreflightSettings(num_ranks=2, num_devices=2, device="cpu")
GOOD = HostFacts(
    node_rank=0,
    host="a",
    address="10.0.0.1",
    versions={"Python": "3.11", "torch": "2.13.0", "dure": "0.1.0", "CUDA": "12.8", "NCCL": "2.27.3"},
    device="cpu",
    num_devices=2,
    visible_devices=0,
    num_ranks=2,
    cores=8,
    cpu_quota=None,
    threads=4,
    available_memory_bytes=64 * GIB,
    open_files=1024,
    most_open_files=4096,
    ports=Ports(first=32768, last=60999, num_used=100),
    interface=Interface(name="eth0", is_up=True, mtu=1500, megabits_per_second=25_000),
    lookup_seconds=0.0,
    shared_memory=Space(path="/dev/shm", total_bytes=8 * GIB, free_bytes=8 * GIB, write_seconds=0.0),
    runs=Space(path="/data", total_bytes=100 * GIB, free_bytes=50 * GIB, write_seconds=0.001),
    gpus=GpuFacts(why_none="no NVIDIA driver"),
)


def host(**changes: Any) -> HostFacts:
    """Return a good host but for what is given."""
    return replace(GOOD, **changes)


def of_name(findings: list[Finding], name: str) -> Finding:
    """Return the first finding of a check."""
    return next(finding for finding in findings if finding.name == name)
