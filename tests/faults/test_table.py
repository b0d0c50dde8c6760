"""Table of what may happen to a run: each row is compared with the same run to which nothing happens.

    make faults REPEAT=20 PYTEST_ARGS=tests/faults/test_table.py

Each repetition draws other moments. Every row is held to the same: each sample used once in each epoch, each step once,
the weights and the last loss of its control, a pause no longer than promised, nothing left behind; and its control,
which has the row's own flags, to nothing having been noticed. `benchmarks/faults.py` keeps what many repetitions gave.
"""

import math
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.commands import Command, Prewarmed, RunFiles, wait_until
from tests.training.checkpoints.checkpoint_cases import flip_bit
from tests.two_hosts import ROUNDING, Hosts, ended, last_weights

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]

HERE = Path(__file__).parents[1]
SAMPLES, BATCH, EPOCHS = 97, 8, 4
STEPS = EPOCHS * -(-SAMPLES // BATCH)
NOTICED = (
    "restart", "hang", "interrupted", "microbatch_halved", "replicas_diverged", "step_skipped", "resumed", "nodes",
)  # fmt: skip
"""Events of a run to which something happened."""
MOST_SILENCE_SECONDS = 15.0
"""Silence after which the hosts of a run whose cable is cut have parted."""
GONE_SECONDS = 5.0
"""Limit within which a supervisor that was killed leaves no process."""


@dataclass(frozen=True)
class Stage:
    """A run that is on, and what may happen to it."""

    folder: Path
    run: RunFiles
    commands: tuple[Command, ...]
    """Command on each host."""
    hosts: Hosts | None
    draw: random.Random

    def wait_a_while(self) -> None:
        """Wait for a moment that is drawn: after some steps, anywhere in the next one or two."""
        steps = self.draw.randint(2, STEPS // 5)
        self.commands[0].wait_for(lambda: len(self.run.records(0)) >= steps, f"{steps} steps")
        time.sleep(self.draw.uniform(0.0, 0.05))
        assert self.commands[0].code is None, self.commands[0].err

    def hurry(self) -> None:
        """Let the rest of the run be done without pauses."""
        (self.folder / "hurry").touch()


Happening = Callable[[Stage], None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that happens, and what must come of it."""

    what: str
    happens: Happening | None = None
    """Disturbance from outside; None for a fault that is planned in the run itself."""
    faults: str = ""
    """Value of `--faults`."""
    task: tuple[object, ...] = ()
    """Options of the task that make it go wrong."""
    flags: tuple[object, ...] = ()
    """Flags of the run and of its control."""
    ranks: int = 2
    on_hosts: bool = False
    """True if there is one rank on each of two hosts."""
    code: int = 0
    says: str = ""
    says_elsewhere: str = ""
    """Message on the other host."""
    events: Mapping[str, int] = field(default_factory=dict)
    """Number of each of the events of `NOTICED` that the run has at its end; 0 for those that are not named."""
    is_resumed: bool = False
    """True if the run ends early and goes on with `--resume`."""
    within_seconds: float
    """Limit from the step before to the next step; for a run that ends, from what happened to its end."""
    repeats_steps: int = 0
    """Most steps that may be done twice."""
    difference: float = 0.0
    """Largest difference between weights and those of the control; 0 is bit by bit."""
    pause_seconds: float = 0.02
    """Shortest time of a step until the run is to hurry, so that the run lasts until the disturbance."""
    instead: str = ""
    """Faults of the control, if the disturbance changes the weights: the same on all ranks."""

    def __str__(self) -> str:
        return self.what


def planned(kind: str, rank: int = 1, step: int = 20, more: str = "") -> str:
    return f'[[fault]]\nrank = {rank}\nstep = {step}\nkind = "{kind}"\n{more}\n'


def signalled(number: int, *targets: int | str) -> Happening:
    """Return what sends a signal at a drawn moment: to ranks, to the `supervisor` or to `everybody`."""

    def happens(stage: Stage) -> None:
        command = stage.commands[0]
        ranks = command.ranks(max([1, *(target for target in targets if isinstance(target, int))]) + 1)
        stage.wait_a_while()
        for target in targets:
            if target == "supervisor":
                command.send(number)
            elif target == "everybody":
                command.send_to_all(number)
            else:
                os.kill(ranks[target], number)

    return happens


def supervisor_killed(stage: Stage) -> None:
    stage.wait_a_while()
    stage.commands[0].send(signal.SIGKILL)
    wait_until(lambda: not stage.commands[0].processes(), "the end of its processes", GONE_SECONDS)


def newest_checkpoint_flipped(stage: Stage) -> None:
    command = stage.commands[0]
    command.wait_for(lambda: len(stage.run.checkpoints()) > 1, "two checkpoints")
    command.send_to_all(signal.SIGKILL)
    wait_until(lambda: command.code is not None, "its end")
    file = stage.run.path / "checkpoints" / stage.run.checkpoints()[-1] / "model.safetensors"
    flip_bit(file, 8 * (file.stat().st_size - 1 - stage.draw.randrange(64)) + stage.draw.randrange(8))


def killed_while_it_saves(stage: Stage) -> None:
    command = stage.commands[0]
    stage.wait_a_while()
    command.wait_for(lambda: list(stage.run.path.glob("checkpoints/.writing-*")), "a save")
    time.sleep(stage.draw.uniform(0.0, 0.03))
    command.send_to_all(signal.SIGKILL)


def host_killed(stage: Stage) -> None:
    stage.wait_a_while()
    stage.commands[1].kill_all()


def cable_cut(seconds: float) -> Happening:
    def happens(stage: Stage) -> None:
        stage.wait_a_while()
        stage.hosts.cut()
        if math.isinf(seconds):
            return
        time.sleep(seconds)
        other = stage.commands[1]
        stands_still = seconds > MOST_SILENCE_SECONDS
        assert not stands_still or (other.code, other.ranks_now()) == (None, []), other.err  # one side trains
        stage.hosts.mend()
        stage.commands[0].wait_for(lambda: stage.run.events("training")[-1]["world_size"] == 2, "both hosts")
        done = len(stage.run.records(0))
        stage.commands[0].wait_for(lambda: len(stage.run.records(0)) > done + 2, "steps with the cable mended")

    return happens


KILL, TERM, INT, USR1, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGSTOP
ONE_RESTART = {"restart": 1}
GOES_ON = {"events": ONE_RESTART, "within_seconds": 3.0, "repeats_steps": 1}
"""Bounds after the death of a rank, for a worker that is killed at any moment."""
ENDS = {"is_resumed": True, "within_seconds": 5.0}
STOPS = {**ENDS, "events": {"interrupted": 1}, "says": "continue with `dure train --resume"}
ONCE = ("--task.once", "went-wrong", "--task.fault", "raise", "--task.step", 20, "--task.rank", 1)
CHECKPOINTS = ("--checkpoint.every-samples", 24)
BAD_DISK = ("--task.bad-rank", 1, "--task.bad-save", 2, "--task.good-save", 4, "--task.reason", "ENOSPC")
REPLICAS = ("--check-replicas-every", 2)

TABLE = [
    # a worker is killed, or dies, at any moment
    *(Row(what=f"rank {rank} is killed", happens=signalled(KILL, rank), **GOES_ON) for rank in (0, 1)),
    Row(what="both ranks are killed", happens=signalled(KILL, 0, 1), **GOES_ON),
    Row(what="two of three are killed", happens=signalled(KILL, 2, 1), ranks=3, **GOES_ON),
    Row(what="a rank with loaders is killed", happens=signalled(KILL, 1), flags=("--num-workers", 1), **GOES_ON),
    Row(what="a native crash", faults=planned("segv"), **GOES_ON),
    Row(what="an exception that comes once", task=ONCE, **GOES_ON),
    Row(what="the same exception twice", task=("--task.fault", "raise", "--task.place", "dataset", "--task.step", 5),
        events=ONE_RESTART, code=1, within_seconds=5.0, says="the same failure came again at step "),
    Row(what="two kills, one after the other", faults=planned("kill", 0, 15) + planned("kill", 1, 16),
        **{**GOES_ON, "events": {"restart": 2}, "repeats_steps": 2}),
    # a rank hangs
    Row(what="a rank stands still", happens=signalled(STOP, 1), flags=("--hang-after", 2, "--on-hang", "restart"),
        events={"restart": 1, "hang": 1}, within_seconds=7.0, repeats_steps=1, says="rank 1 was stopped from outside"),
    # a host goes, or its cable
    Row(what="a host goes", happens=host_killed, on_hosts=True, events={"nodes": 1}, within_seconds=5.0,
        repeats_steps=1, difference=ROUNDING),
    Row(what="the cable is cut for 5 s", happens=cable_cut(5.0), on_hosts=True, within_seconds=15.0,
        repeats_steps=1, difference=ROUNDING),
    Row(what="the cable is cut for 20 s", happens=cable_cut(20.0), on_hosts=True, pause_seconds=0.4,
        events={"nodes": 2}, within_seconds=MOST_SILENCE_SECONDS, repeats_steps=2, difference=ROUNDING,
        says_elsewhere="the run goes on without this node, which tries to come back"),
    Row(what="the cable is cut for good", happens=cable_cut(math.inf), on_hosts=True, events={"nodes": 1},
        within_seconds=MOST_SILENCE_SECONDS, repeats_steps=1, difference=ROUNDING,
        says_elsewhere="meanwhile the run was completed"),
    # the supervisor alone, or everything
    Row(what="the supervisor is killed", happens=supervisor_killed, flags=CHECKPOINTS, code=-KILL, **ENDS),
    Row(what="everything is killed", happens=signalled(KILL, "everybody"), flags=CHECKPOINTS, code=-KILL, **ENDS),
    # somebody asks for the end
    Row(what="SIGTERM to the supervisor", happens=signalled(TERM, "supervisor"), code=143, **STOPS),
    Row(what="SIGINT from the terminal", happens=signalled(INT, "everybody"), code=130, **STOPS),
    Row(what="SIGTERM to a rank", happens=signalled(TERM, 1), code=143, **STOPS),
    Row(what="SIGUSR1 to the supervisor", happens=signalled(USR1, "supervisor"), code=75, **STOPS),
    Row(what="SIGUSR1 to a rank", happens=signalled(USR1, 0), code=75, **STOPS),
    # memory, disk, numbers
    Row(what="out of memory", faults=planned("oom"), events={"microbatch_halved": 1}, within_seconds=3.0,
        difference=ROUNDING),
    Row(what="killed while it saves", happens=killed_while_it_saves, flags=("--task.write-seconds", 0.02, *CHECKPOINTS),
        code=-KILL, **ENDS),
    Row(what="a bit of the newest checkpoint", happens=newest_checkpoint_flipped, flags=CHECKPOINTS, code=-KILL,
        **ENDS),
    Row(what="a disk that is full for a while", task=BAD_DISK, flags=CHECKPOINTS, within_seconds=3.0,
        says="; training goes on, and the next checkpoint is tried again"),
    Row(what="a loss that is not a number", faults=planned("nan"), code=1, says="the loss is nan at step 20", **ENDS),
    Row(what="the same, skipped", faults=planned("nan"), instead=planned("nan", 0) + planned("nan", 1),
        flags=("--on-nonfinite", "skip"), events={"step_skipped": 1}, within_seconds=3.0),
    # ranks that are not the same
    Row(what="ranks disagree", task=("--task.fault", "longer", *ONCE[:2], "--task.rank", 1), code=1,
        within_seconds=2.0, says="training samples is 97 on rank 0 and 98 on rank 1"),
    Row(what="a bit of a weight, healed", faults=planned("flip"), flags=(*REPLICAS, "--on-divergence", "heal"), ranks=3,
        events={"replicas_diverged": 1, "restart": 1}, within_seconds=3.0, repeats_steps=2),
    Row(what="a bit of a weight, stopped", faults=planned("flip"), flags=REPLICAS, ranks=3, code=1,
        says="rank 1 holds other values than ranks 0, 2", events={"replicas_diverged": 1}, **ENDS),
    # a rank talks a million lines
    *(Row(what=f"rank {rank} says a million lines", within_seconds=3.0,
          task=("--task.fault", "talk", "--task.place", "each loss", "--task.rank", rank)) for rank in (0, 1)),
]  # fmt: skip


class Bench:
    """Starts runs and keeps the controls: one for all rows of the same flags."""

    def __init__(self, folder: Path, prewarmed: Prewarmed) -> None:
        self.folder, self.prewarmed = folder, prewarmed
        self._controls: dict[tuple[object, ...], RunFiles] = {}

    def words(self, row: Row, faults: str, folder: Path) -> tuple[object, ...]:
        nproc = row.ranks // 2 if row.on_hosts else row.ranks
        usual = (
            "train", f"{HERE / 'disk_task.py'}:OnBadDisk", "--strategy", "ddp", "--nproc", nproc, "--threads", 1,
            "--global-batch-size", BATCH, "--epochs", EPOCHS, "--snapshot-every", 1, "--record-samples",
            "--name", "run", "--task.adam", "true", "--task.dropout", 0.0 if row.difference else 0.2,
        )  # fmt: skip
        if faults:
            (folder / "faults.toml").write_text(faults)
            usual = (*usual, "--faults", folder / "faults.toml")
        return (*usual, *row.flags, *([] if row.on_hosts else ["--quiet"]))  # quiet hosts say nothing of each other

    def begin(self, row: Row, folder: Path, hosts: Hosts | None, seed: str) -> Stage:
        """Start a run to which something will happen."""
        words = self.words(row, row.faults, folder)
        words = (*words, *row.task, "--task.pause-seconds", row.pause_seconds, "--task.paused-until", folder / "hurry")
        commands = self.start(words, folder, hosts)
        return Stage(folder, RunFiles(folder / "runs/run"), commands, hosts, random.Random(seed))

    def start(self, words: tuple[object, ...], folder: Path, hosts: Hosts | None) -> tuple[Command, ...]:
        if hosts is None:
            return (self.prewarmed.start(folder, *words),)
        return tuple(hosts.start(node, folder, *words, nnodes="1:2") for node in range(2))

    def control(self, row: Row, hosts: Hosts | None) -> RunFiles:
        """Return a run like the row's, to which nothing happens; it is to notice nothing."""
        key = (row.flags, row.ranks, row.on_hosts, row.instead, row.difference)
        if key not in self._controls:
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            commands = self.start(self.words(row, row.instead, folder), folder, hosts)
            assert set(ended(commands)) == {0}, [command.err for command in commands]
            run = RunFiles(folder / "runs/run")
            if not row.instead:
                assert row.on_hosts or not commands[0].err, commands[0].err
                assert {name: run.events(name) for name in NOTICED if run.events(name)} == {}
            check_samples_and_steps(run)
            self._controls[key] = run
        return self._controls[key]


@pytest.fixture(scope="module")
def bench(prewarmed: Prewarmed, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("controls"), prewarmed)


def all_records(run: RunFiles) -> list[dict]:
    return [record for rank in range(3) for record in run.records(rank)]


def check_samples_and_steps(run: RunFiles) -> None:
    records = all_records(run)
    for epoch in range(EPOCHS):
        used = Counter(index for record in records if record["epoch"] == epoch for index in record["samples"])
        assert used == Counter(range(SAMPLES)), f"epoch {epoch}"
    assert [record["step"] for record in run.records(0)] == list(range(1, STEPS + 1))


def longest_pause(run: RunFiles) -> float:
    times = sorted(record["time"] for record in [*all_records(run), *run.undone()])
    return max(after - before for before, after in pairwise(times))


def happened_at(stage: Stage, begun: float) -> float:
    """Return when it happened, as the run or its task says; otherwise when it was begun from outside."""
    told = [event["time"] for name in ("fault", "restart") for event in stage.run.events(name)]
    file = stage.folder / "went-wrong"
    return min(told, default=float(file.read_text()) if file.exists() else begun)


def seconds_of(row: Row, stage: Stage) -> float:
    """Let it happen and the run end; return the longest pause, or how long the end took."""
    begun = time.time()
    try:
        if row.happens is not None:
            row.happens(stage)
            begun = time.time()
        stage.hurry()
        code = stage.commands[0].wait()
        seconds = time.time() - happened_at(stage, begun) if code else longest_pause(stage.run)
        if stage.hosts is not None:
            stage.hosts.mend()
            stage.commands[1].wait()
    finally:
        for command in stage.commands:
            command.kill_all()
        if stage.hosts is not None:
            stage.hosts.mend()
    assert code == row.code, stage.commands[0].err
    return seconds


def check_run(row: Row, run: RunFiles, control: RunFiles) -> None:
    """See that a run came to its end as if it had not happened."""
    check_samples_and_steps(run)
    if not row.is_resumed or "interrupted" in row.events:
        assert len({record["step"] for record in run.undone()}) <= row.repeats_steps
    mine, its = last_weights(run.path), last_weights(control.path)
    assert mine.keys() == its.keys()
    assert max(float(np.abs(mine[name] - its[name]).max()) for name in mine) <= row.difference
    losses = [last["loss_sum"] / last["loss_count"] for last in (run.records(0)[-1], control.records(0)[-1])]
    assert abs(losses[0] - losses[1]) <= row.difference


def check(row: Row, bench: Bench, stage: Stage, record: Callable[[str, object], None]) -> None:
    """Hold a row to what is promised."""
    seconds = seconds_of(row, stage)
    record("seconds", round(seconds, 3))
    record("within_seconds", row.within_seconds)
    assert row.says in stage.commands[0].err
    assert row.says_elsewhere in stage.commands[-1].err
    assert seconds < row.within_seconds
    counted = {name: len(stage.run.events(name)) for name in NOTICED}
    counted["interrupted"] = min(counted["interrupted"], 1)  # each rank that has heard of it says so
    # a host that comes back may need a second try: a round more, and the same hosts
    hosts = [event["nodes"] for event in stage.run.events("nodes")]
    counted["nodes"] = sum(after != before for before, after in pairwise([[0, 1], *hosts]))
    assert {name: count for name, count in counted.items() if count} == dict(row.events)
    if row.is_resumed:
        assert stage.run.records(0)[-1]["step"] < STEPS
        resumed = bench.prewarmed.run(stage.folder, "train", "--resume", stage.run.path)
        assert resumed.code == 0, resumed.err
    if row.is_resumed or not row.code:
        check_run(row, stage.run, bench.control(row, stage.hosts))


@pytest.mark.parametrize("row", [row for row in TABLE if not row.on_hosts], ids=str)
def test_run_when_it_happens_then_it_is_as_if_it_had_not(row, bench, tmp_path, request, record_property):
    bench.control(row, None)  # first: it must be right where nothing happens
    check(row, bench, bench.begin(row, tmp_path, None, request.node.name), record_property)


@pytest.mark.parametrize("row", [row for row in TABLE if row.on_hosts], ids=str)
def test_hosts_when_it_happens_then_it_is_as_if_it_had_not(row, bench, hosts, tmp_path, request, record_property):
    bench.control(row, hosts)
    check(row, bench, bench.begin(row, tmp_path, hosts, request.node.name), record_property)
