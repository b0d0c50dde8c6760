"""One host: facts as they are, changed for real where that can be done, and the rules over them."""

import errno
import os
import resource
import subprocess
import threading

import pytest

from dure.preflight import host_facts as host_facts_module
from dure.preflight.host_checks import host_checks
from dure.preflight.host_facts import Interface, Ports, Space, cpu_quota, host_facts
from dure.preflight.settings import PreflightSettings
from tests.preflight.facts import GIB, SETTINGS, host, of_name

EMPTY = Space(path="/x", total_bytes=8 * GIB, free_bytes=8 * GIB)


def test_host_when_looked_at_then_nothing_is_wrong_with_what_was_made_up_as_good():
    found = host_checks(host(), SETTINGS, 2)
    assert {finding.name: finding.status for finding in found} == {
        **dict.fromkeys(["open files", "/dev/shm", "disk", "memory", "cores", "ports", "interface"], "ok"),
        "GPUs": "skipped",
    }


def test_this_host_when_looked_at_then_its_facts_are_what_the_system_says(tmp_path):
    facts = host_facts(PreflightSettings(num_ranks=2, num_devices=2, device="cpu", runs_dir=tmp_path / "runs"))
    assert facts.open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert (facts.interface.name, facts.interface.is_up, facts.interface.is_loopback) == ("lo", True, True)
    assert facts.runs.path == str(tmp_path)
    assert facts.runs.error is None
    assert facts.runs.write_seconds > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "name", "status", "text"),
    [
        (
            {"open_files": 60},
            "open files",
            "failure",
            "may have 60 files open, but this run needs about 88: `ulimit -n 4",
        ),
        ({"open_files": 60, "most_open_files": 60}, "open files", "failure", "the hard limit is 60: raise it in"),
        (
            {"shared_memory": Space(path="/dev/shm", total_bytes=64 * 2**20, free_bytes=64 * 2**20)},
            *("/dev/shm", "warning", "what a container gets by default"),
        ),
        (
            {"shared_memory": Space(path="/dev/shm", error="Permission denied")},
            "/dev/shm",
            "warning",
            "(Permission denied)",
        ),
        (
            {"shared_memory": Space(path="/dev/shm", total_bytes=8 * GIB, free_bytes=2**20)},
            *("/dev/shm", "warning", "1.0 MiB of 8.0 GiB free, but loader workers and NCCL may want 64.0 MiB"),
        ),
        (
            {"runs": Space(path="/r", total_bytes=GIB, error="No space left on device")},
            *("disk", "failure", "nothing can be written to /r: No space left on device (it is full)"),
        ),
        ({"runs": Space(path="/r", total_bytes=GIB, free_bytes=GIB // 2)}, "disk", "warning", "512.0 MiB free in /r"),
        ({"runs": Space(path="/r", total_bytes=GIB, free_bytes=2**20)}, "disk", "failure", "1.0 MiB free in /r"),
        (
            {"runs": Space(path="/r", total_bytes=9 * GIB, free_bytes=9 * GIB, write_seconds=2.5)},
            *("disk", "warning", "one small write took 2.5 s"),
        ),
        ({"available_memory_bytes": GIB}, "memory", "warning", "1.0 GiB are available to 2 rank(s)"),
        ({"cores": 4, "threads": 4}, "cores", "warning", "want 8, and take turns: use --threads 2"),
        ({"cores": 1, "threads": 1}, "cores", "warning", "use --nproc 1"),
        (
            {"cpu_quota": 2.0},
            "cores",
            "warning",
            "may use 2 cores at a time, of 8, but 2 rank(s) of 4 thread(s) want 8",
        ),
        ({"ports": Ports(first=40000, last=40099, num_used=0)}, "ports", "warning", "100 of 100 ports"),
        (
            {"ports": Ports(first=40000, last=40099, num_used=100, error="Address already in use")},
            *("ports", "failure", "none could be had: Address already in use, but ranks listen on free ports: widen"),
        ),
        ({"interface": None}, "interface", "failure", "no network interface of this host has the address 10.0.0.1"),
        (
            {"interface": Interface(name="eth0", is_up=False, mtu=1500)},
            *("interface", "failure", "eth0 is down, but ranks meet on it: `ip link set eth0 up`"),
        ),
        ({"interface": Interface(name="eth0", is_up=True, mtu=576)}, "interface", "warning", "has an MTU of 576"),
        ({"lookup_seconds": 10.0}, "interface", "warning", "asking for the name of node 0's address took 10.0 s"),
    ],
)
def test_host_when_something_is_wrong_then_it_is_told_with_its_cure(changes, name, status, text):
    found = of_name(host_checks(host(**changes), SETTINGS, 2), name)
    assert (found.status, text in found.text) == (status, True), found.text
    assert found.cure


def test_shared_memory_when_loader_workers_need_it_then_its_absence_is_a_failure():
    settings = PreflightSettings(num_ranks=2, num_devices=2, device="cpu", num_workers=4)
    facts = host(shared_memory=Space(path="/dev/shm", error="Permission denied"))
    assert of_name(host_checks(facts, settings, 2), "/dev/shm").status == "failure"


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (70, 70))
from dure.cli import main
sys.exit(main(["preflight", "--nproc", "2", "--threads", "1", "--json"]))
"""


def test_open_files_when_they_are_limited_for_real_then_the_number_is_named(tmp_path, prewarmed):
    (tmp_path / "limited.py").write_text(LIMITED)
    run = prewarmed.run(tmp_path, script=tmp_path / "limited.py")
    assert run.code == 3
    assert '"seen": "a process may have 70 files open"' in run.out
    assert "it could not come through: see open files" in run.out
    assert run.err == "dure: not ready: open files\n"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_disk_when_it_is_full_then_that_is_told_and_nothing_is_left_there(small_disk):
    (small_disk / "filled").write_bytes(bytes(60 * 1024))
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "more").write_bytes(bytes(60 * 1024))
    (small_disk / "more").unlink(missing_ok=True)
    (small_disk / "filled").write_bytes(bytes(64 * 1024))
    facts = host_facts(PreflightSettings(num_ranks=1, num_devices=1, device="cpu", runs_dir=small_disk / "runs"))
    found = of_name(host_checks(facts, SETTINGS, 1), "disk")
    assert found.seen == f"nothing can be written to {small_disk}: No space left on device (it is full)"
    assert [path.name for path in small_disk.iterdir()] == ["filled"]


def test_disk_when_the_runs_folder_is_a_file_then_that_is_told(tmp_path):
    (tmp_path / "runs").touch()
    facts = host_facts(PreflightSettings(num_ranks=1, num_devices=1, device="cpu", runs_dir=tmp_path / "runs"))
    assert facts.runs.error == "it is a file and no folder"


def test_disk_when_it_cannot_make_writes_durable_then_that_is_told(tmp_path, monkeypatch):
    def refuse(_descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    facts = host_facts(PreflightSettings(num_ranks=1, num_devices=1, device="cpu", runs_dir=tmp_path))
    assert facts.runs.error == "this file system does not make writes durable (fsync)"
    assert list(tmp_path.iterdir()) == []


def test_disk_when_its_server_is_gone_then_nobody_waits_for_it(tmp_path, monkeypatch):
    is_back = threading.Event()
    monkeypatch.setattr(host_facts_module, "_DISK_PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(host_facts_module, "existing_part", lambda path: is_back.wait(10) and path)
    try:
        facts = host_facts(PreflightSettings(num_ranks=1, num_devices=1, device="cpu", runs_dir=tmp_path))
        assert facts.runs == Space(path=str(tmp_path), error="it did not answer within 0.05 s")
    finally:
        is_back.set()


def test_ports_when_none_can_be_had_then_that_is_told(monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EADDRINUSE, "Address already in use")

    monkeypatch.setattr(host_facts_module.socket, "create_server", refuse)
    assert host_facts(SETTINGS).ports.error == "Address already in use"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.cfs_quota_us": "200000", "cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_quota_of_a_container_when_there_is_one_then_is_read(files, quota, tmp_path, monkeypatch):
    for place in (tmp_path, tmp_path / "cpu"):
        place.mkdir(exist_ok=True)
        for name, text in files.items():
            (place / name).write_text(text)
    monkeypatch.setattr("dure.host.cgroups.CGROUPS", tmp_path)
    assert cpu_quota() == quota
