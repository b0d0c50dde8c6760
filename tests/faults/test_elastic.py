"""Runs on several hosts that survive: a rank dies, a host goes, its cable is cut, and it comes back."""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.commands import Command, RunFiles
from tests.two_hosts import Hosts, ended, last_weights

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
NUM_SAMPLES, BATCH = 97, 8
UNNAMED = ("train", TASK, "--global-batch-size", BATCH, "--threads", 1, "--record-samples", "--snapshot-every", 1)
QUIET = ("--quiet",)


def words(name: str, epochs: int, *more: object) -> tuple[object, ...]:
    return (*UNNAMED, "--name", name, "--epochs", epochs, *QUIET, *more)


def wait_for_step(run: RunFiles, step: int, command: Command) -> None:
    command.wait_for(lambda: (records := run.records(0)) and records[-1]["step"] >= step, f"step {step}")


def used_samples(run: RunFiles) -> Counter:
    return Counter(
        index
        for path in run.path.glob("rank*.jsonl")
        for r in run.records(int(path.stem[4:]))
        for index in r["samples"]
    )


def each_used(run: RunFiles, epochs: int) -> bool:
    return used_samples(run) == Counter(dict.fromkeys(range(NUM_SAMPLES), epochs))


def largest_difference(one: Path, other: Path) -> float:
    mine, theirs = last_weights(one), last_weights(other)
    assert mine.keys() == theirs.keys()
    return max(float(np.abs(mine[name] - theirs[name]).max()) for name in mine)


def pauses(run: RunFiles) -> list[float]:
    """Return how long no step was done around each change: from the last one before it to the first one after."""
    times = sorted(
        record["time"] for path in run.path.glob("rank*.jsonl") for record in run.records(int(path.stem[4:]))
    )
    changes = [event["time"] for event in run.events("training")[1:]]
    found = []
    for change in changes:
        before = [t for t in times if t <= change]
        after = [t for t in times if t > change]
        if before and after:
            found.append(after[0] - before[-1])
    return found


CYCLES = 10


def descriptors(command: Command) -> int:
    return len(os.listdir(f"/proc/{command.pid}/fd"))


def wait_for_ranks(run: RunFiles, world_size: int, command: Command, rounds: int) -> None:
    """Wait until a later round trains on so many ranks, and has done two steps."""

    def is_there() -> bool:
        rounds_there = run.events("training")
        return len(rounds_there) > rounds and rounds_there[-1]["world_size"] == world_size

    command.wait_for(is_there, f"{world_size} ranks")
    wait_for_step(run, run.events("training")[-1]["step"] + 2, command)


def test_node_when_it_is_killed_and_comes_back_again_and_again_then_the_run_goes_on_as_if_nothing_were(
    hosts: Hosts, tmp_path
):
    paused = ("--task.pause-seconds", 0.05, "--task.paused-until", tmp_path / "hurry", "--nproc", 2)
    head, other = (hosts.start(node, tmp_path, *words("run", 60, *paused), nnodes="1:2") for node in range(2))
    run = RunFiles(tmp_path / "runs/run")
    wait_for_ranks(run, 2, head, 0)
    before = descriptors(head)
    for cycle in range(CYCLES):
        other.kill_all()
        began = time.monotonic()
        wait_for_ranks(run, 1, head, 2 * cycle + 1)
        assert time.monotonic() - began < 5.0
        other.wait(seconds=5)
        other = hosts.start(1, tmp_path, *words("run", 60, *paused), nnodes="1:2")
        wait_for_ranks(run, 2, head, 2 * cycle + 2)
        assert descriptors(head) <= before
    (tmp_path / "hurry").touch()
    assert ended((head, other)) == [0, 0], head.err + other.err
    assert each_used(run, 60)
    print(pauses(run), run.events("repeated"))


def test_cable_when_it_is_cut_for_a_while_then_one_side_trains_and_the_other_comes_back(hosts: Hosts, tmp_path):
    paused = ("--task.pause-seconds", 0.05, "--task.paused-until", tmp_path / "hurry", "--nproc", 2)
    head, other = (hosts.start(node, tmp_path, *words("run", 90, *paused), nnodes="1:2") for node in range(2))
    run = RunFiles(tmp_path / "runs/run")
    wait_for_ranks(run, 2, head, 0)
    try:
        hosts.cut()
        time.sleep(5.0)
        assert len(run.events("training")) == 1
        hosts.mend()
        wait_for_step(run, run.records(0)[-1]["step"] + 5, head)
        assert len(run.events("training")) == 1
        hosts.cut()
        began = time.monotonic()
        wait_for_ranks(run, 1, head, 1)
        assert time.monotonic() - began < 15.0
        time.sleep(max(0.0, began + 20.0 - time.monotonic()))
        assert other.code is None
        assert not [p for p in other.processes() if p.pid != other.pid]
    finally:
        hosts.mend()
    wait_for_ranks(run, 2, head, 2)
    (tmp_path / "hurry").touch()
    assert ended((head, other)) == [0, 0], head.err + other.err
    assert each_used(run, 90)
    print(pauses(run), run.events("repeated"), other.err)


def test_leader_when_it_is_killed_then_the_other_leads_and_takes_it_back(hosts: Hosts, tmp_path):
    paused = ("--task.pause-seconds", 0.05, "--task.paused-until", tmp_path / "hurry", "--nproc", 2)
    head, other = (hosts.start(node, tmp_path, *words("run", 60, *paused), nnodes="1:2") for node in range(2))
    run = RunFiles(tmp_path / "runs/run")
    wait_for_ranks(run, 2, head, 0)
    head.kill_all()
    began = time.monotonic()
    wait_for_ranks(run, 1, other, 1)
    print(time.monotonic() - began)
    head.wait()
    head = hosts.start(0, tmp_path, *words("run", 60, *paused), nnodes="1:2")
    wait_for_ranks(run, 2, other, 2)
    (tmp_path / "hurry").touch()
    assert ended((head, other)) == [0, 0], head.err + other.err
    assert each_used(run, 60)
    print(pauses(run), run.events("repeated"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_when_they_are_killed_on_any_host_then_the_weights_are_those_of_the_undisturbed(
    hosts: Hosts, tmp_path, strategy
):
    more = (
        "--task.pause-seconds",
        0.02,
        "--nproc",
        4,
        "--strategy",
        strategy,
        "--task.dropout",
        0.2,
        "--task.adam",
        "true",
        "--max-restarts",
        9,
    )
    undisturbed = hosts.both(tmp_path, *words("undisturbed", 6, *more))
    assert ended(undisturbed) == [0, 0], [command.err for command in undisturbed]
    commands = hosts.both(tmp_path, *words("run", 6, *more))
    run = RunFiles(tmp_path / "runs/run")
    draw = random.Random(0)
    for number, node in enumerate((1, 0, 1)):
        wait_for_step(run, 15 * (number + 1), commands[0])
        time.sleep(0.1 * draw.random())
        os.kill(draw.choice(commands[node].ranks(2)), signal.SIGKILL)
        commands[0].wait_for(lambda n=number: len(run.events("training")) == n + 2, "the next round")
    assert ended(commands) == [0, 0], [command.err for command in commands]
    assert len(run.events("restart")) == 3
    assert each_used(run, 6)
    assert largest_difference(tmp_path / "runs/run", tmp_path / "runs/undisturbed") == 0.0
    print(pauses(run))
