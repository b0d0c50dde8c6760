"""Counts of processes that the kernel ended for want of memory: groups of both versions as folders, and the host's."""

import os
from pathlib import Path

import pytest

from dure.host.cgroups import groups_of
from dure.host.oom import OomWatch

GIB = 2**30


class Machine:
    """Counters of the kernel: this process's real groups, in a root of our own."""

    def __init__(self, folder: Path, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.vmstat, self.version = folder / "cgroup", folder / "vmstat", version
        monkeypatch.setattr("dure.host.cgroups.CGROUPS", self.root)
        monkeypatch.setattr("dure.host.oom._VMSTAT", self.vmstat)
        self.host(0)
        chain = list(groups_of("memory", os.getpid()))
        tops = {1: self.root / "memory", 2: self.root}
        of_version = [group for group in chain if (self.root / "memory" in (group, *group.parents)) == (version == 1)]
        self.own, self.top = of_version[0], tops[version]

    def host(self, kills: int) -> None:
        self.vmstat.write_text(f"nr_free_pages 12\noom_kill {kills}\n")

    def group(self, folder: Path, kills: int, fulls: int, limit: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if self.version == 2:
            (folder / "memory.events").write_text(f"low 0\nmax 9\noom {fulls}\noom_kill {kills}\noom_group_kill 0\n")
            (folder / "memory.max").write_text("max\n" if limit is None else f"{limit}\n")
        else:
            (folder / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
            (folder / "memory.failcnt").write_text(f"{fulls}\n")
            (folder / "memory.limit_in_bytes").write_text(f"{2**63 - 4096 if limit is None else limit}\n")

    def watch(self) -> OomWatch:
        return OomWatch(os.getpid())


@pytest.fixture(params=[1, 2], ids=["version 1", "version 2"])
def machine(request, tmp_path, monkeypatch) -> Machine:
    try:
        return Machine(tmp_path, request.param, monkeypatch)
    except IndexError:
        pytest.skip(f"this process is in no group of version {request.param}")


def test_kill_when_the_group_was_full_then_its_limit_is_known(machine):
    machine.group(machine.own, 3, 7, GIB)
    watch = machine.watch()
    machine.group(machine.own, 4, 9, GIB)
    assert (watch.was_killed(), watch.limit_bytes()) == (True, GIB)


def test_kill_when_memory_and_swap_together_were_full_then_the_limit_is_known_though_nobody_counts_that(machine):
    if machine.version == 2:
        pytest.skip("version 2 has a limit of its own for swap")
    machine.group(machine.own, 0, 0, GIB)
    (machine.own / "memory.memsw.limit_in_bytes").write_text(f"{GIB}\n")
    watch = machine.watch()
    machine.group(machine.own, 1, 0, GIB)
    (machine.own / "memory.memsw.max_usage_in_bytes").write_text(f"{GIB - 2**20}\n")
    assert (watch.was_killed(), watch.limit_bytes()) == (True, GIB)


def test_kill_when_the_group_was_not_full_then_it_was_the_host(machine):
    machine.group(machine.own, 3, 7, GIB)
    watch = machine.watch()
    machine.group(machine.own, 4, 7, GIB)
    assert (watch.was_killed(), watch.limit_bytes()) == (True, None)


def test_kill_when_another_container_had_one_then_it_is_not_ours(machine):
    machine.group(machine.own, 3, 7, None)
    watch = machine.watch()
    machine.host(1)
    assert watch.was_killed() is False


def test_kill_when_only_the_host_counts_then_its_counter_is_taken(machine):
    watch = machine.watch()
    assert watch.was_killed() is False
    machine.host(1)
    assert (watch.was_killed(), watch.limit_bytes()) == (True, None)


def test_kill_when_the_group_is_gone_then_the_host_is_asked(machine):
    machine.group(machine.own, 0, 0, GIB)
    watch = machine.watch()
    for file in machine.own.iterdir():
        if file.is_file():
            file.unlink()
    machine.host(1)
    assert watch.was_killed() is True


def test_kill_when_nothing_counts_then_it_is_not_known(tmp_path, monkeypatch):
    monkeypatch.setattr("dure.host.cgroups.CGROUPS", tmp_path / "none")
    monkeypatch.setattr("dure.host.oom._VMSTAT", tmp_path / "none")
    assert OomWatch(os.getpid()).was_killed() is None
    assert OomWatch(2**30).was_killed() is None


def test_process_when_it_is_put_into_another_group_then_that_one_counts(machine, monkeypatch):
    chains = [[machine.own, machine.top], [machine.top / "job", machine.top], [machine.top]]
    monkeypatch.setattr("dure.host.oom.groups_of", lambda *_: iter(chains.pop(0)))
    machine.group(machine.top / "job", 5, 1, 2 * GIB)
    machine.group(machine.own, 0, 0, None)
    watch = machine.watch()
    watch.look()
    machine.group(machine.top / "job", 6, 2, 2 * GIB)
    watch.look()  # it is about to end, and seems to be in the root
    assert (watch.was_killed(), watch.limit_bytes()) == (True, 2 * GIB)
