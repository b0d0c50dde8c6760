"""Runs that grow while they are watched, and servers of their pages."""

import asyncio
import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.records.events import Training
from dure.records.run_dir import LOCK, RunDir
from dure.records.step_record import step_line
from dure.report.live.examination import Examination
from dure.report.live.live_run import LiveRun
from tests.record_cases import step_of

if TYPE_CHECKING:
    from dure.report.live.server import WatchServer

SPEC = Path(__file__).parents[2] / "samples" / "run_folders" / "resumed" / "spec.json"


def new_run(path: Path) -> RunDir:
    """Return a run without records."""
    path.mkdir()
    (path / "spec.json").write_bytes(SPEC.read_bytes())
    return RunDir(path)


def start(world_size: int = 2, **fields: Any) -> Training:
    usual = {"num_devices": world_size, "device": "cpu", "epoch_samples": 100, "total_samples": 1000}
    return Training(world_size=world_size, **{**usual, "samples_seen": 0, "step": 0, **fields})


def append(run: RunDir, rank: int, steps: Any, **fields: Any) -> None:
    """Append records of steps, of 8 samples each, a second apart."""
    with run.records_path(rank).open("a") as file:
        for step in steps:
            at = {"step": step, "samples_seen": 8 * step, "time": 1.75e9 + step, "loss_sum": 64.0 / step}
            file.write(step_line(step_of(**{**at, **fields})))


@contextmanager
def going_on(run: RunDir) -> Iterator[None]:
    """Let a run go on: its lock is held."""
    with (run.path / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def watched(run: RunDir, findings: Any = (), **settings: Any) -> Iterator["WatchServer"]:
    """Serve the page of a run."""
    from dure.report.live.server import WatchServer

    found: list[WatchServer] = []
    has_started = threading.Event()
    loops: list[tuple[asyncio.AbstractEventLoop, Any]] = []

    async def serve() -> None:
        with Examination(run, lambda _: findings) as examination:
            found.append(WatchServer(LiveRun(run), examination, interval_seconds=0.1, **settings))
            loops.append((asyncio.get_running_loop(), asyncio.current_task()))
            await found[0].run(has_started.set)

    def target() -> None:
        try:
            asyncio.run(serve())
        except asyncio.CancelledError:
            pass
        finally:
            has_started.set()

    thread = threading.Thread(target=target)
    thread.start()
    try:
        assert has_started.wait(30)
        yield found[0]
    finally:
        (loop, task) = loops[0]
        loop.call_soon_threadsafe(task.cancel)
        thread.join(30)
