"""SIGKILL of everything at random moments, resumed anywhere: every sample once, and the undisturbed run's weights."""

import functools
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.commands import Command, Prewarmed, RunFiles, wait_until
from tests.conformance.cases import are_same_bits
from tests.training.checkpoints.checkpoint_cases import flip_bit

TASK = f"{Path(__file__).parents[1] / 'faulty_task.py'}:Faulty"
EPOCHS, SAMPLES, BATCH = 3, 97, 8
BASE = ("train", TASK, "--global-batch-size", BATCH, "--epochs", EPOCHS, "--record-samples", "--name", "run", "--quiet")
PACE = ("--task.pause-seconds", 0.004, "--checkpoint.every-samples", 24)
TOLERANCE = 1e-10
"""Difference between ways to divide the same float64 sums, whose order differs: measured here below 1e-14."""

GONE_AFTER_SECONDS = 5.0
"""Promised limit for a run whose launcher was killed; it takes some hundredths of that."""


@dataclass(frozen=True)
class Way:
    """Strategy and number of processes of one attempt."""

    strategy: str
    nproc: int

    @property
    def flags(self) -> tuple[object, ...]:
        return ("--strategy", self.strategy, "--nproc", self.nproc)

    @property
    def num_processes(self) -> int:
        return self.nproc if self.strategy == "ddp" else 1


DDP_2, DDP_3, SINGLE = Way("ddp", 2), Way("ddp", 3), Way("single", 1)
ROUTES = {
    "two ranks all along": [DDP_2] * 4,
    "one process all along": [SINGLE] * 4,
    "fewer and more ranks": [DDP_2, DDP_3, SINGLE, DDP_2],
    "through every strategy": [Way("dp", 3), DDP_3, Way("balanced_dp", 2), SINGLE, DDP_2],
}


def weights(prewarmed: Prewarmed, folder: Path) -> dict[str, torch.Tensor]:
    assert prewarmed.run(folder, "export", folder / "runs/run", folder / "weights.safetensors").code == 0
    return load_file(folder / "weights.safetensors")


@pytest.fixture(scope="module")
def undisturbed(
    prewarmed: Prewarmed, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, torch.Tensor]]:
    """Give the weights of a run that nobody kills, made once for each way and its options."""

    @functools.cache
    def made(way: Way, *more: object) -> dict[str, torch.Tensor]:
        folder = tmp_path_factory.mktemp("undisturbed")
        command = prewarmed.run(folder, *BASE, *way.flags, *more)
        assert command.code == 0, command.err
        return weights(prewarmed, folder)

    return made


def kill_everything(command: Command, run: RunFiles, moment: random.Random) -> bool:
    """Kill the whole session at a random moment after its start; return whether it was still alive.

    Before `spec.json` is written there is no run to resume, and a slow disk delays it.
    """
    started = len(run.events("attempt"))
    command.wait_for(lambda: len(run.events("attempt")) > started and (run.path / "spec.json").is_file(), "an attempt")
    time.sleep(moment.uniform(0.1, 0.5))
    if command.code is None:
        command.send_to_all(signal.SIGKILL)
    return command.wait() == -signal.SIGKILL


def go(prewarmed: Prewarmed, folder: Path, route: list[Way], seed: int, *more: object) -> tuple[RunFiles, int]:
    """Run along the route, killed on every leg but the last; return the run and the number of kills."""
    moment, run, num_kills = random.Random(seed), RunFiles(folder / "runs/run"), 0
    for leg, way in enumerate(route):
        begin = (*BASE, *more) if leg == 0 else ("train", "--resume", run.path)
        command = prewarmed.start(folder, *begin, *PACE[:2] if leg == 0 else (), *PACE[2:], *way.flags)
        if leg < len(route) - 1:
            num_kills += kill_everything(command, run, moment)
    assert command.wait() == 0, command.err
    return run, num_kills


def check_every_sample_once(run: RunFiles) -> None:
    records = [record for rank in range(3) for record in run.records(rank)]
    for epoch in range(EPOCHS):
        used = Counter(index for record in records if record["epoch"] == epoch for index in record["samples"])
        assert used == Counter(range(SAMPLES)), f"epoch {epoch}"
    steps = [record["step"] for record in run.records(0)]
    assert steps == list(range(1, EPOCHS * -(-SAMPLES // BATCH) + 1))


def check(
    prewarmed: Prewarmed, folder: Path, expected: dict[str, torch.Tensor], route: list[Way], seed: int, *more: object
) -> int:
    run, num_kills = go(prewarmed, folder, route, seed, *more)
    check_every_sample_once(run)
    is_same_throughout = len(set(route)) == 1
    for name, tensor in weights(prewarmed, folder).items():
        if is_same_throughout:
            assert torch.equal(tensor, expected[name]), name
        else:
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=TOLERANCE)
    assert not list(run.path.glob("checkpoints/.*"))
    return num_kills


def test_run_when_it_is_killed_and_resumed_on_more_ranks_then_each_sample_is_used_once(
    undisturbed, prewarmed, tmp_path
):
    check(prewarmed, tmp_path, undisturbed(DDP_3), [DDP_2, DDP_3], 1)


@pytest.mark.slow
def test_run_when_only_its_launcher_is_killed_then_ranks_and_ports_are_gone_and_the_next_start_resumes(
    undisturbed, prewarmed, tmp_path
):
    expected = undisturbed(DDP_2)
    run = RunFiles(tmp_path / "runs/run")
    command = prewarmed.start(tmp_path, *BASE, *PACE, *DDP_2.flags)
    command.wait_for(lambda: run.checkpoints(), "a checkpoint")
    ports = listening(command)
    assert ports
    command.send(signal.SIGKILL)
    deadline = time.monotonic() + GONE_AFTER_SECONDS
    wait_until(lambda: not command.processes(), f"the end of {command.processes()}", GONE_AFTER_SECONDS)
    wait_until(lambda: not any(answers(port) for port in ports), f"{ports} to close", deadline - time.monotonic())
    assert command.wait() == -signal.SIGKILL
    seen = run.records(0)[-1]["samples_seen"]
    assert seen < EPOCHS * SAMPLES
    assert "  died" in prewarmed.run(tmp_path, "doctor", run.path).out
    resumed = prewarmed.run(tmp_path, "train", "--resume", run.path)
    assert resumed.code == 0, resumed.err
    check_every_sample_once(run)
    assert are_same_bits(weights(prewarmed, tmp_path), expected)


def listening(command: Command) -> list[tuple[str, int]]:
    """Return where its processes listen."""
    sockets = [one for process in command.processes() for one in process.net_connections("tcp")]
    return [tuple(one.laddr) for one in sockets if one.status == psutil.CONN_LISTEN]


def answers(port: tuple[str, int]) -> bool:
    try:
        socket.create_connection(port, timeout=1).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.slow
def test_checkpoint_when_a_bit_of_the_newest_is_flipped_then_two_ranks_go_on_from_the_one_before(
    undisturbed, prewarmed, tmp_path
):
    expected = undisturbed(DDP_2)
    run = RunFiles(tmp_path / "runs/run")
    command = prewarmed.start(tmp_path, *BASE, *PACE, "--no-checkpoint.background", *DDP_2.flags)
    command.wait_for(lambda: len(run.checkpoints()) > 1, "two checkpoints")
    command.send_to_all(signal.SIGKILL)
    command.wait()
    *_, before, newest = run.checkpoints()
    flip_bit(run.path / "checkpoints" / newest / "model.safetensors", 8 * 400 + 3)
    resumed = prewarmed.run(tmp_path, "train", "--resume", run.path, "--no-quiet")
    assert resumed.code == 0, resumed.err
    warnings = [line for line in resumed.err.splitlines() if "damaged" in line]
    assert len(warnings) == 1, resumed.err
    assert f"checkpoint {newest} is damaged: model.safetensors " in warnings[0]
    assert resumed.err.count(f"taking {before}, the newest good one") == 1
    assert [f"samples-{event['samples_seen']:012d}" for event in run.events("resumed")] == [before]
    check_every_sample_once(run)
    assert are_same_bits(weights(prewarmed, tmp_path), expected)


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("route", ROUTES)
def test_run_when_it_is_killed_again_and_again_then_it_is_as_if_it_never_was(
    route, optimizer, undisturbed, prewarmed, tmp_path
):
    options = ("--task.adam", str(optimizer == "adam").lower())
    expected = undisturbed(ROUTES[route][-1], *options)
    assert check(prewarmed, tmp_path, expected, ROUTES[route], len(route), *options) > 0


@pytest.mark.faults
def test_run_with_dropout_when_it_is_killed_then_the_same_ranks_draw_the_same(undisturbed, prewarmed, tmp_path):
    options = ("--task.dropout", 0.3)
    check(prewarmed, tmp_path, undisturbed(DDP_2, *options), [DDP_2] * 3, 7, *options)


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_run_when_it_is_killed_while_checkpoints_are_written_then_the_last_whole_one_is_taken(
    undisturbed, prewarmed, tmp_path
):
    """A checkpoint after every step and a model large enough that most kills fall into one."""
    options = ("--task.width", 20_000)
    expected = undisturbed(DDP_2, *options)
    run, moment, num_torn = RunFiles(tmp_path / "runs/run"), random.Random(3), 0
    for leg in range(9):
        begin = (*BASE, *options) if leg == 0 else ("train", "--resume", run.path)
        command = prewarmed.start(tmp_path, *begin, "--checkpoint.every-samples", BATCH, *DDP_2.flags)
        if leg < 8:
            # what the last kill left is cleaned up when training begins
            command.wait_for(lambda leg=leg: len(run.events("training")) > leg, "training")
            time.sleep(moment.uniform(0.0, 0.1))
            command.wait_for(lambda: list(run.path.glob("checkpoints/.writing-*")), "a save")
            time.sleep(moment.uniform(0.0, 0.005))
            command.send_to_all(signal.SIGKILL)
            assert command.wait() == -signal.SIGKILL
            num_torn += bool(list(run.path.glob("checkpoints/.writing-*")))
    assert command.wait() == 0, command.err
    assert num_torn > 0
    check_every_sample_once(run)
    for name, tensor in weights(prewarmed, tmp_path).items():
        assert torch.equal(tensor, expected[name]), name
    assert not list(run.path.glob("checkpoints/.*"))
