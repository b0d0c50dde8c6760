"""Three hosts at a switch, whose cables are cut at its end, one way, or slow, whose clocks differ, and which reboot."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dure.records.leader_term import newest_term
from tests.commands import Command, RunFiles
from tests.faults.test_elastic import is_each_sample_used, largest_difference, paused, train, wait_for_ranks
from tests.two_hosts import HEAD, ROUNDING, SwitchedHosts, ended

pytestmark = pytest.mark.timeout(180)

DURE = Path(__file__).with_name("hosts_dure.py")
HOST = os.uname().nodename
AHEAD_SECONDS = (0, 3600, -86400)
"""Seconds by which the three hosts' clocks are ahead."""


@pytest.fixture(autouse=True)
def mended(switched: SwitchedHosts) -> Iterator[None]:
    yield
    for node in range(3):
        switched.mend(node)


def start(hosts: SwitchedHosts, folder: Path, node: int, *, epochs: int = 40, ahead_seconds: float = 0) -> Command:
    words = train("run", *paused(folder), epochs=epochs)
    return hosts.start(node, folder, *words, nnodes="1:3", script=DURE, CLOCK_AHEAD_SECONDS=str(ahead_seconds))


def num_rounds(run: RunFiles) -> int:
    return len(run.events("training"))


def check_undisturbed(hosts: SwitchedHosts, folder: Path, commands: list[Command], epochs: int = 40) -> None:
    """See that the run comes to the weights of one that nothing happened to, and leaves nothing open."""
    (folder / "hurry").touch()
    assert ended(tuple(commands)) == [0, 0, 0], "\n".join(command.err for command in commands)
    run = RunFiles(folder / "runs/run")
    assert run.summary()["status"] == "completed"
    assert is_each_sample_used(run, epochs, ranks=3)
    for event in run.events("nodes"):  # who comes is of the very next round
        come = re.findall(r"node (\d) \([^)]*\)(?=[^:]* (?:is|are) there)", event["message"])
        assert {int(node) for node in come} <= set(event["nodes"])
    assert not (run.path / ".leader/lease.json").exists()
    assert [hosts.listeners(node) for node in range(3)] == [set(), set(), set()]
    alone = hosts.start(0, folder, *train("alone", "--quiet", epochs=epochs), several=False)
    assert alone.wait() == 0, alone.err
    assert largest_difference(run.path, folder / "runs/alone") < ROUNDING


@pytest.mark.hosts
def test_hosts_when_cables_are_cut_at_the_far_end_and_one_way_then_they_come_back_and_one_side_trains(
    switched: SwitchedHosts, tmp_path
):
    commands = [start(switched, tmp_path, node) for node in range(3)]
    head, run = commands[0], RunFiles(tmp_path / "runs/run")
    wait_for_ranks(run, 3, head, 0)

    def cut(*cuts: tuple[Callable[[int], None], int], away: tuple[int, ...]) -> None:
        before, said = num_rounds(run), [len(command.err) for command in commands]
        for how, node in cuts:
            how(node)
        wait_for_ranks(run, 3 - len(away), head, before)
        for node in away:
            new = commands[node].wait_for(lambda node=node: news(commands[node].err[said[node] :]), f"node {node}")
            assert f"nothing is heard of node 0 ({HOST}, {HEAD}), which still leads the run: the network" in new
        # several knocks later: who is not answered does not take the run for ended
        assert [command.code for command in commands] == [None, None, None]

    def mend(*nodes: int) -> None:
        before = num_rounds(run)
        for node in nodes:
            switched.mend(node)
        wait_for_ranks(run, 3, head, before)

    cut((switched.cut, 2), away=(2,))
    mend(2)
    cut((switched.cut_to, 1), (switched.cut_from, 2), away=(1, 2))
    mend(1, 2)
    cut((switched.cut, 0), away=(1, 2))  # the one that leads alone, the other two together
    commands[1].send(signal.SIGTERM)
    assert commands[1].wait(5.0) == 143
    assert "dure: stopped while the node that leads the run could not be reached: if the run " in commands[1].err
    commands[1] = start(switched, tmp_path, 1)
    mend(0)
    cut((switched.cut, 2), away=(2,))
    assert newest_term(run.path) == 1  # nobody else has led
    check_undisturbed(switched, tmp_path, commands)
    assert commands[2].err.endswith("cut or too slow; meanwhile the run was completed\n")


def news(said: str) -> str | None:
    return said if "the run goes on without this node, which tries to come back for 30 s" in said else None


@pytest.mark.hosts
def test_hosts_when_clocks_differ_and_one_is_late_and_slow_and_each_reboots_then_the_weights_are_the_same(
    switched: SwitchedHosts, tmp_path
):
    def begin(node: int) -> Command:
        return start(switched, tmp_path, node, epochs=20, ahead_seconds=AHEAD_SECONDS[node])

    commands = [begin(0), begin(1)]
    run = RunFiles(tmp_path / "runs/run")
    wait_for_ranks(run, 2, commands[0], 0)
    switched.slow(2, "200kbit")
    commands.append(begin(2))
    wait_for_ranks(run, 3, commands[0], 1)
    for node in (1, 2, 0, 1, 2):
        before, other = num_rounds(run), commands[(node + 1) % 3]
        switched.cut(node)  # a host that is switched off says nothing more, and resets no connection
        commands[node].kill_all()
        wait_for_ranks(run, 2, other, before)
        before = num_rounds(run)
        switched.mend(node)
        commands[node] = begin(node)
        wait_for_ranks(run, 3, other, before)
    assert {event["leader"] for event in run.events("nodes")} >= {0, 1}
    check_undisturbed(switched, tmp_path, commands, epochs=20)
    assert 0 < run.summary()["wall_seconds"] < 600


def num_joined(hosts: SwitchedHosts) -> int:
    """Return how many connections the launcher of node 0 has at its port (29400)."""
    lines = hosts.inside(0, "cat", "/proc/net/tcp").splitlines()
    return sum(words[1].endswith(":72D8") and words[3] == "01" for line in lines if (words := line.split()))


@pytest.mark.faults
def test_host_when_it_reboots_while_others_are_awaited_then_it_comes_again_and_all_begin(
    switched: SwitchedHosts, tmp_path
):
    def begin(node: int) -> Command:
        return switched.start(node, tmp_path, *train("run", "--nproc", 1, epochs=2), nnodes="3", script=DURE)

    commands = [begin(0), begin(1)]
    commands[0].wait_for(lambda: num_joined(switched) == 1, "node 1")
    switched.cut(1)
    commands[1].kill_all()
    commands[0].wait_for(lambda: num_joined(switched) == 0, "the end of what leads nowhere")
    switched.mend(1)
    commands[1:] = [begin(1), begin(2)]
    check_undisturbed(switched, tmp_path, commands, epochs=2)
