"""Execution of one case of the campaign: its run is started, the fault happens, and the run is resumed."""

import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from campaign_case import (
    BATCH,
    EPOCHS,
    HANG_AFTER_SECONDS,
    IN_THE_TASK,
    SAMPLES,
    STEP_SECONDS,
    STEPS,
    Case,
)
from paired import HERE

from dure.records.jsonl import read_lines
from tests.commands import Command, Prewarmed, RunFiles, is_pump
from tests.faults.test_kill_and_resume import listening
from tests.two_hosts import Hosts, made_namespaces

TASK = f"{HERE.parent / 'tests' / 'disk_task.py'}:OnBadDisk"
START_SECONDS, TRAINING_SECONDS, LEAVING_SECONDS = 0.8, 1.0, 0.3
"""Durations of which a case draws a fraction."""
PACES = {
    "evaluation": ("--task.pause-seconds", 0.0, "--task.eval-pause-seconds", 0.08),
    "saving": ("--task.pause-seconds", STEP_SECONDS, "--task.write-seconds", 0.01),
}
"""Pauses by which a run spends most of its time where the fault is to find it."""
USUAL_PACE = ("--task.pause-seconds", STEP_SECONDS, "--task.eval-pause-seconds", 0.02)
PATIENCE_SECONDS = 60.0
"""Time after which a command that has not ended counts as one that never does."""
FIRST_CALLS = 9
"""Calls of the loss with which the first step is over: an exception in it ends the run."""
LINKS = ("to1", "cable")
"""Interfaces of the two hosts towards each other: torch RPC, which unpickles, is to be told that it may use them."""
SHM = Path("dev/shm")


@dataclass
class Places:
    """Processes and folders that all cases share."""

    folder: Path
    server: Prewarmed
    hosts: Hosts | None
    disk: Path | None
    """A file system of a few megabytes."""

    def named_shared_memory(self) -> set[str]:
        """Return the names in `/dev/shm` as the commands see it: as root each server has one of its own."""
        servers = [self.server, *(self.hosts.servers if self.hosts else ())]
        return {name for server in servers for name in os.listdir(f"/proc/{server.process.pid}/root" / SHM)}

    def take_from_disk(self, folder: Path) -> None:
        """Move a case's run from the small disk into its folder: the next case is to find the disk empty."""
        for run in [] if self.disk is None else self.disk.iterdir():
            shutil.move(run, folder / "runs")


@dataclass
class WholeLines(RunFiles):
    """A run's folder as dure reads it: a line that a crash or a full disk tore is left out."""

    def _lines(self, name: str) -> list[dict[str, Any]]:
        return list(read_lines(self.path / f"{name}.jsonl"))


@dataclass
class Seen:
    """Outcome of a case."""

    run: RunFiles
    commands: tuple[Command, ...]
    happened: bool = False
    time: float = math.inf
    """Seconds since the epoch when it happened."""
    codes: tuple[int, ...] = ()
    seconds: float = 0.0
    """Time from the fault, or from the start where there was none, to the end of all commands."""
    ports: set[tuple[str, int]] = field(default_factory=set)
    """Addresses on which the run listened when it happened."""
    resumed: Command | None = None

    def steps_done(self) -> int:
        """Return how many steps were done when it happened: records come to the disk later."""
        records = [*self.run.records(0), *self.run.undone()]
        return max((record["step"] for record in records if record["time"] <= self.time), default=0)


@contextmanager
def places(folder: Path, *, with_hosts: bool, can_mount: bool) -> Iterator[Places]:
    """Prepare servers, hosts and the small disk, and take them away again."""
    own_shm = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
    names = tuple(f"campaign{os.getpid()}{letter}" for letter in "abc")
    disk = folder / "disk" if can_mount else None
    servers: list[Prewarmed] = []
    try:
        if disk is not None:
            disk.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=True)
        servers.append(Prewarmed(*(own_shm if can_mount else ())))
        hosts = None
        if with_hosts:
            made_namespaces(names)
            servers += [Prewarmed("ip", "netns", "exec", name, *own_shm) for name in names[:2]]
            hosts = Hosts(names, tuple(servers[1:]))
        yield Places(folder, servers[0], hosts, disk)
    finally:
        for server in servers:
            server.close()
        if with_hosts:
            for name in names:
                subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        if disk is not None:
            subprocess.run(["umount", disk], check=False)


def words(case: Case, folder: Path, num_hosts: int = 1) -> tuple[object, ...]:
    """Return the command of an undisturbed run, as it is given on each host."""
    microbatch = () if case.microbatch_size is None else ("--microbatch-size", case.microbatch_size)
    return (
        *("train", TASK, "--name", "run", "--quiet", "--record-samples", "--threads", 1, "--device", "cpu"),
        *("--strategy", case.strategy, "--nproc", case.nproc // num_hosts, *case.options, *microbatch),
        *(
            "--global-batch-size",
            BATCH,
            "--epochs",
            EPOCHS,
            "--eval-batch-size",
            BATCH,
            "--runs-dir",
            folder,
            "--task.num-samples",
            SAMPLES,
        ),
        *("--task.width", 12, "--task.adam", str(case.adam).lower(), "--task.dropout", case.dropout),
    )


def disturbed_words(case: Case, folder: Path, runs: Path) -> tuple[object, ...]:
    """Return the command of the run to which the fault happens."""
    fault = case.fault
    more: tuple[object, ...] = (
        *("--start", case.start, "--num-workers", case.num_workers, "--max-restarts", case.max_restarts),
        *("--checkpoint.every-samples", case.checkpoint_every),
        *("--task.paused-until", folder / "hurry", *PACES.get(fault.moment, USUAL_PACE)),
        "--checkpoint.background" if case.checkpoint_async else "--no-checkpoint.background",
    )
    if fault.kind in ("SIGSTOP", "hang"):  # elsewhere a busy machine is slower than a few seconds
        more = (*more, "--hang-after", HANG_AFTER_SECONDS)
    if case.snapshot_every is not None:
        more = (*more, "--snapshot-every", case.snapshot_every)
    if fault.kind in IN_THE_TASK:
        call = FIRST_CALLS + int(fault.fraction * (STEPS - FIRST_CALLS))
        more = (*more, "--task.fault", IN_THE_TASK[fault.kind], "--task.rank", fault.rank, "--task.step", call)
        more = (*more, "--task.once", folder / "went-wrong")
    return (*words(case, runs, len(LINKS) if case.is_on_hosts else 1), *more)


def carry_out(case: Case, places: Places, folder: Path) -> Seen:
    """Run a case to its end, and resume it where it ended early."""
    folder.mkdir()
    runs = folder / "runs"
    if case.fault.kind == "full disk":
        runs = places.disk / folder.name
    seen = Seen(WholeLines(runs / "run"), ())
    argv = disturbed_words(case, folder, runs)
    if case.is_on_hosts:
        seen.commands = tuple(
            places.hosts.start(node, folder, *argv, nnodes=case.nnodes, TP_SOCKET_IFNAME=link)
            for node, link in enumerate(LINKS)
        )
    else:
        seen.commands = (places.server.start(folder, *argv),)
    begun = time.monotonic()
    try:
        if case.fault.kind not in IN_THE_TASK and wait_for_moment(case, seen):
            seen.ports = {port for command in seen.commands for port in listening_of(command)}
            begun, seen.time = time.monotonic(), time.time()
            happen(case, seen, places, folder)
        seen.codes = tuple(command.wait(PATIENCE_SECONDS) for command in seen.commands)
        seen.seconds = time.monotonic() - begun
    finally:
        for command in seen.commands:
            command.kill_all()
        if case.is_on_hosts:
            places.hosts.mend()
    if case.fault.kind in IN_THE_TASK:
        seen.happened = (folder / "went-wrong").exists()
    if any(seen.codes) and (seen.run.path / "spec.json").exists() and not is_complete(seen.run):
        resume(case, seen, places, folder)
    return seen


def is_complete(run: RunFiles) -> bool:
    """Return whether the run did all its steps and said so, whoever was killed after that."""
    return bool(run.events("completed"))


def resume(case: Case, seen: Seen, places: Places, folder: Path) -> None:
    """Go on with the run, the same way or another."""
    (folder / "hurry").touch()
    argv: tuple[object, ...] = ("train", "--resume", seen.run.path, "--quiet", "--hang-after", 30)
    if case.is_on_hosts:  # the resumed run is on one
        argv = (*argv, "--nproc", case.nproc)
    if case.resumed_as is not None:
        argv = (*argv, "--strategy", case.resumed_as[0], "--nproc", case.resumed_as[1])
    seen.resumed = places.server.start(folder, *argv)
    try:
        seen.resumed.wait(PATIENCE_SECONDS)
    finally:
        seen.resumed.kill_all()


def listening_of(command: Command) -> list[tuple[str, int]]:
    """Return where a command listens; nothing if a process of it ends meanwhile."""
    try:
        return listening(command)
    except psutil.Error:
        return []


def wait_for_moment(case: Case, seen: Seen) -> bool:
    """Wait for the moment; return whether the run still goes on then."""
    fault, run = case.fault, seen.run

    def is_over() -> bool:
        return seen.commands[0].code is not None

    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_over() and not condition() and time.monotonic() < deadline:
            time.sleep(0.002)

    if fault.moment == "start":
        time.sleep(fault.fraction * START_SECONDS * (5 if case.start == "spawn" else 1))
    elif fault.moment == "leaving":
        wait(lambda: len(run.events("evaluated")) == EPOCHS)
        time.sleep(fault.fraction * LEAVING_SECONDS)
    else:
        wait(lambda: run.events("training"))
        time.sleep(fault.fraction * TRAINING_SECONDS)
        if fault.moment == "saving":
            wait(lambda: list(run.path.glob("checkpoints/.writing-*")))
    return not is_over()


def happen(case: Case, seen: Seen, places: Places, folder: Path) -> None:
    """Let the fault happen."""
    fault = case.fault
    if fault.kind == "full disk":
        fill(places.disk, fault.seconds)
        seen.happened = True
    elif fault.kind == "cut":
        places.hosts.cut()
        time.sleep(fault.seconds)
        places.hosts.mend()
        seen.happened = True
    elif fault.target == "everybody":
        send_to_group(case, seen, case.fault.signal)
    else:
        targets = find_targets(case, seen)
        for number, target in enumerate(targets):
            if number:
                time.sleep(fault.fraction * 0.005)
            seen.happened |= send(target, fault.signal)
        if fault.target == "rank again" and seen.happened:
            again(case, seen, targets[0])
        if fault.signal == signal.SIGSTOP:
            time.sleep(fault.seconds)
            for target in targets:
                send(target, signal.SIGCONT)


def fill(disk: Path, seconds: float) -> None:
    """Leave no room on the disk for some time."""
    room = os.statvfs(disk)
    filler = disk / "filler"
    with suppress(OSError):
        filler.write_bytes(bytes(room.f_bavail * room.f_frsize))
    time.sleep(seconds)
    filler.unlink()


def send_to_group(case: Case, seen: Seen, number: signal.Signals) -> None:
    """Signal all processes of one host, as its terminal does."""
    command = seen.commands[case.fault.rank % len(seen.commands)]
    with suppress(ProcessLookupError):
        command.send_to_all(number)
        seen.happened = True
    if number == signal.SIGSTOP:
        time.sleep(case.fault.seconds)
        with suppress(ProcessLookupError):
            command.send_to_all(signal.SIGCONT)


def again(case: Case, seen: Seen, before: int) -> None:
    """Send the signal to the same rank once more, as soon as it is there again."""
    deadline = time.monotonic() + 5
    while seen.commands[0].code is None and time.monotonic() < deadline:
        targets = find_targets(case, seen)
        if targets and targets[0] != before:
            time.sleep(case.fault.fraction * 0.3)
            send(targets[0], case.fault.signal)
            if case.fault.signal == signal.SIGSTOP:
                time.sleep(case.fault.seconds)
                send(targets[0], signal.SIGCONT)
            return
        time.sleep(0.002)


def send(pid: int, number: signal.Signals) -> bool:
    """Signal a process; return whether it was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def find_targets(case: Case, seen: Seen) -> list[int]:
    """Return the processes that are meant, of those that are there now."""
    fault = case.fault
    command = seen.commands[fault.rank % len(seen.commands)]
    if fault.target == "supervisor":
        return [command.pid]
    ranks = children(command.pid)
    if case.is_on_hosts:
        return ranks[:1]
    if fault.target == "server":
        return ranks[case.nproc :][fault.rank % case.num_servers :][:1]
    if fault.target == "all ranks":
        return ranks
    if fault.target == "two ranks":
        return [*ranks[fault.rank :], *ranks[: fault.rank]][:2]
    if fault.target == "loader":
        return [pid for rank in ranks[fault.rank :][:1] for pid in children(rank)][-1:]
    return ranks[fault.rank :][:1]


def children(pid: int) -> list[int]:
    """Return the ranks of a supervisor, or the loaders of a rank, in the order in which they were started."""
    with suppress(psutil.NoSuchProcess):
        found = psutil.Process(pid).children()
        return sorted(one.pid for one in found if not is_pump(one) and not is_tracker(one))
    return []


def is_tracker(process: psutil.Process) -> bool:
    """Return whether it is a process that Python's multiprocessing keeps for itself."""
    with suppress(psutil.Error):
        return any("resource_tracker" in word for word in process.cmdline())
    return True
