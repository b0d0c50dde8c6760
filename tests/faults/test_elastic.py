"""Runs on several hosts that survive: a rank dies, a host goes, its cable is cut, and it comes back."""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.commands import Command, RunFiles, wait_until
from tests.two_hosts import ROUNDING, Hosts, ended, last_weights

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
NUM_SAMPLES, BATCH, EPOCHS = 97, 8, 80
CYCLES = 10
"""Number of times that a host goes and comes back."""
RESET_SECONDS, SILENCE_SECONDS, RETURN_SECONDS = 5.0, 15.0, 2.0
"""Seconds in which the others go on after a reset connection, and after silence; and the pause before a return."""
GROWTH_BYTES = 16 * 2**20
"""Growth of the leader's own memory over all cycles: fragmentation, not a leak per cycle."""


def train(name: str, *more: object, epochs: int = EPOCHS) -> tuple[object, ...]:
    usual = ("train", TASK, "--global-batch-size", BATCH, "--threads", 1, "--record-samples", "--snapshot-every", 1)
    return (*usual, "--name", name, "--epochs", epochs, *more)


def paused(folder: Path, nproc: int = 1) -> tuple[object, ...]:
    """Return words for a run that lasts until it is to hurry."""
    return ("--task.pause-seconds", 0.05, "--task.paused-until", folder / "hurry", "--nproc", nproc)


def steps_of(run: RunFiles) -> list[float]:
    """Return when steps were done, on any rank."""
    return sorted(record["time"] for rank in range(4) for record in run.records(rank))


def wait_for_ranks(run: RunFiles, world_size: int, command: Command, rounds: int) -> None:
    """Wait until a later round than so many trains on so many ranks, and has done two steps."""

    def is_there() -> bool:
        begun = run.events("training")
        return len(begun) > rounds and begun[-1]["world_size"] == world_size

    command.wait_for(is_there, f"{world_size} ranks")
    first = run.events("training")[-1]["step"]
    command.wait_for(lambda: (records := run.records(0)) and records[-1]["step"] >= first + 2, "two steps")


def pauses(run: RunFiles) -> dict[int, list[float]]:
    """Return by the number of ranks that went on: how long there was no step when a round ended."""
    times, found = steps_of(run), {}
    for event in run.events("training")[1:]:
        before = max((t for t in times if t <= event["time"]), default=event["time"])
        after = min((t for t in times if t > event["time"]), default=event["time"])
        found.setdefault(event["world_size"], []).append(after - before)
    return found


def is_each_sample_used(run: RunFiles, epochs: int = EPOCHS, ranks: int = 4) -> bool:
    used = Counter(index for rank in range(ranks) for record in run.records(rank) for index in record["samples"])
    return used == Counter(dict.fromkeys(range(NUM_SAMPLES), epochs))


def largest_difference(one: Path, other: Path) -> float:
    mine, theirs = last_weights(one), last_weights(other)
    assert mine.keys() == theirs.keys()
    return max(float(np.abs(mine[name] - theirs[name]).max()) for name in mine)


def undisturbed(hosts: Hosts, folder: Path, epochs: int = EPOCHS) -> Path:
    """Train the same on one host and one rank."""
    alone = hosts.start(0, folder, *train("alone", "--quiet", epochs=epochs), several=False)
    assert alone.wait() == 0, alone.err
    return folder / "runs/alone"


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_ranks_when_they_are_killed_on_any_host_then_the_weights_are_those_of_the_undisturbed(
    hosts: Hosts, tmp_path, strategy
):
    more = ("--nproc", 2, "--strategy", strategy, "--task.dropout", 0.2, "--task.adam", "true", "--max-restarts", 9)
    more = (*more, "--quiet", "--task.pause-seconds", 0.02)
    control = hosts.both(tmp_path, *train("control", *more, epochs=4))
    assert ended(control) == [0, 0], [command.err for command in control]
    commands = hosts.both(tmp_path, *train("run", *more, epochs=4))
    run, draw = RunFiles(tmp_path / "runs/run"), random.Random(0)
    for number, node in enumerate((1, 0, 1)):
        wait_for_ranks(run, 4, commands[0], number)
        time.sleep(0.2 * draw.random())
        os.kill(draw.choice(commands[node].ranks(2)), signal.SIGKILL)
    assert ended(commands) == [0, 0], [command.err for command in commands]
    assert len(run.events("restart")) == 3
    assert is_each_sample_used(run, 4)
    assert largest_difference(run.path, tmp_path / "runs/control") == 0.0
    assert max(pauses(run)[4]) < RESET_SECONDS
    assert "killed (SIGKILL)" in run.events("restart")[0]["message"]


def test_host_when_it_is_killed_and_comes_back_again_and_again_then_the_weights_are_those_of_the_undisturbed(
    hosts: Hosts, tmp_path
):
    words = train("run", *paused(tmp_path))
    head, other = (hosts.start(node, tmp_path, *words, nnodes="1:2") for node in range(2))
    run = RunFiles(tmp_path / "runs/run")
    wait_for_ranks(run, 2, head, 0)
    leader, open_files, grown_from = psutil.Process(head.pid), len(os.listdir(f"/proc/{head.pid}/fd")), 0
    for cycle in range(CYCLES):
        other.kill_all()
        wait_for_ranks(run, 1, head, 2 * cycle + 1)
        other = hosts.start(1, tmp_path, *words, nnodes="1:2")
        wait_for_ranks(run, 2, head, 2 * cycle + 2)
        grown_from = grown_from or leader.memory_info().rss
    assert len(os.listdir(f"/proc/{head.pid}/fd")) <= open_files
    assert leader.memory_info().rss - grown_from < GROWTH_BYTES
    (tmp_path / "hurry").touch()
    assert ended((head, other)) == [0, 0], head.err + other.err
    assert is_each_sample_used(run)
    assert largest_difference(run.path, undisturbed(hosts, tmp_path)) < ROUNDING
    found = pauses(run)
    assert max(found[1]) < RESET_SECONDS
    assert max(found[2]) < RETURN_SECONDS, found[2]
    assert len(run.checkpoints()) == len(set(run.checkpoints())) <= 3


def test_leader_when_it_stands_still_then_the_other_leads_and_it_comes_back_as_one_of_many(hosts: Hosts, tmp_path):
    (tmp_path / "faults.toml").write_text('[[fault]]\nrank = 0\nstep = 12\nkind = "cut"\nseconds = 14\n')
    words = train("run", *paused(tmp_path), "--faults", tmp_path / "faults.toml")
    head, other = (hosts.start(node, tmp_path, *words, nnodes="1:2") for node in range(2))
    run = RunFiles(tmp_path / "runs/run")
    wait_for_ranks(run, 1, other, 1)
    wait_for_ranks(run, 2, other, 2)
    (tmp_path / "hurry").touch()
    assert ended((head, other)) == [0, 0], head.err + other.err
    assert [event["leader"] for event in run.events("nodes")] == [1, 1]
    assert is_each_sample_used(run)
    assert largest_difference(run.path, undisturbed(hosts, tmp_path)) < ROUNDING
    assert max(pauses(run)[1]) < SILENCE_SECONDS


@pytest.mark.slow
def test_three_hosts_when_the_leader_is_killed_and_then_too_few_are_left_then_they_wait_and_go_on(
    hosts: Hosts, tmp_path
):
    words = train("run", *paused(tmp_path, 2), epochs=40)

    def start(node: int) -> Command:
        return hosts.start(node, tmp_path, *words, nnodes="2:3", at=min(node, 1))

    first, second, third = (start(node) for node in range(3))
    run = RunFiles(tmp_path / "runs/run")
    wait_for_ranks(run, 6, first, 0)
    first.kill_all()
    wait_for_ranks(run, 4, second, 1)
    third.kill_all()
    wait_until(lambda: "1 of the 2 nodes that the run needs are there" in second.err, "the others")
    assert len(run.events("training")) == 2
    third = start(2)
    wait_for_ranks(run, 4, second, 2)
    first = start(0)
    wait_for_ranks(run, 6, second, 3)
    (tmp_path / "hurry").touch()
    assert ended((first, second, third)) == [0, 0, 0], first.err + second.err + third.err
    assert {event["leader"] for event in run.events("nodes")} == {1}
    assert is_each_sample_used(run, 40, ranks=6)
    assert largest_difference(run.path, undisturbed(hosts, tmp_path, 40)) < ROUNDING
    assert max(pauses(run)[4][:1]) < RESET_SECONDS
