"""Choice of a run's algorithm, and what happens where shared memory is not available."""

import pytest

from dure.comm import choice
from dure.comm.algorithms.opening import open_all_reduce
from dure.comm.choice import choose_algorithm, host_numbers, open_chosen
from dure.comm.groups import Solo
from dure.errors import EnvironmentLacks, SpecInvalid
from tests.comm.gloo_ranks import on_ranks


@pytest.mark.parametrize(
    ("wanted", "device", "hosts", "chosen"),
    [
        ("auto", "cpu", [0, 0], "shm"),
        ("auto", "cpu", [0, 1], "ring"),
        ("auto", "cpu", [0], "ring"),
        ("auto", "cuda", [0, 0], "backend"),
        ("tree", "cpu", [0, 0], "tree"),
        ("shm", "cpu", [0, 0, 0], "shm"),
    ],
)
def test_algorithm_when_chosen_then_follows_from_device_and_hosts(wanted, device, hosts, chosen):
    assert choose_algorithm(wanted, device, hosts) == chosen


@pytest.mark.parametrize(
    ("device", "hosts", "seen"), [("cpu", [0, 1], "2 hosts"), ("cuda", [0, 0], "device cuda on linux")]
)
def test_shared_memory_when_there_is_none_in_common_then_is_refused(device, hosts, seen):
    with pytest.raises(SpecInvalid, match=f"comm is shm but this run has {seen}: shared memory reaches CPU ranks"):
        choose_algorithm("shm", device, hosts)


def test_hosts_when_ranks_are_of_one_machine_then_have_one_number():
    assert host_numbers(Solo()) == [0]
    assert on_ranks(3, host_numbers) == [[0, 0, 0]] * 3


def test_shared_memory_when_the_system_gives_none_then_auto_takes_a_ring_and_asking_for_it_says_why(monkeypatch):
    def lacking(name, process_group=None, *, hosts=None):
        if name == "shm":
            raise EnvironmentLacks("no shared memory here")
        return open_all_reduce(name, process_group, hosts=hosts)

    monkeypatch.setattr(choice, "open_all_reduce", lacking)
    assert on_ranks(2, lambda group: open_chosen("auto", "cpu", group).name) == ["ring", "ring"]

    def said(group):
        with pytest.raises(EnvironmentLacks, match="shared memory") as caught:
            open_chosen("shm", "cpu", group)
        return str(caught.value)

    assert on_ranks(2, said) == ["no shared memory here"] * 2
