"""Runs of a folder, with the status of each."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from dure.errors import DureError, RunInvalid
from dure.records.events import Attempt
from dure.records.run_dir import SCRIPT, SPEC, SUMMARY, RunDir, os_errors_as_sentences
from dure.records.step_record import RunEnd

_Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]

_CLOCK_SLACK_SECONDS = 0.02
"""Seconds by which a file time may be behind `time.time()`: the kernel's coarse clock lags by up to one tick."""


@dataclass(frozen=True, kw_only=True)
class RunOverview:
    """A run as shown by `dure runs`."""

    name: str
    path: str
    status: str
    """`running`, `completed`, `interrupted`, `failed`, `died` (it ended without a record of it) or `unreadable`."""
    task: str | None = None
    strategy: str | None = None
    world_size: _Count | None = None
    num_devices: _Count | None = None
    samples: _Count | None = None
    best: dict[str, str | _Count | float | None] | None = None
    """Best evaluation, as in the run's summary: `metric`, `value`, `samples_seen`, `checkpoint`."""
    fault: str | None = None
    """Reason why it is `unreadable`; None otherwise."""


_CHECKED = TypeAdapter(RunOverview)


def list_runs(runs_dir: Path) -> list[RunOverview]:
    """Return the runs of a folder by name, which for default names is by date; damaged runs are included.

    Raises:
        RunInvalid: The folder does not exist or cannot be read.
    """
    if not runs_dir.is_dir():
        raise RunInvalid(f"{runs_dir} is no folder: start a run with `dure train`, or point --runs-dir at your runs")
    with os_errors_as_sentences(runs_dir, "read"):
        paths = sorted(runs_dir.iterdir())
    return [overview(RunDir(path)) for path in paths if _may_be_run(path)]


def _may_be_run(path: Path) -> bool:
    try:
        return RunDir(path).is_script or (path / SPEC).is_file()
    except PermissionError:  # it belongs to another user, and only that user can tell
        return True


def start_time(run: RunDir) -> float:
    """Return the time at which a run was created, in seconds since the epoch; 0 if that cannot be read."""
    for name in (SPEC, SCRIPT):
        with suppress(OSError):
            return (run.path / name).stat().st_mtime
    return 0.0


def overview(run: RunDir) -> RunOverview:
    """Return the status of a run and its facts; a damaged run is `unreadable`."""
    try:
        with os_errors_as_sentences(run.path, "read"), run.understood():
            found = _script_overview(run) if run.is_script else _task_overview(run)
            return _CHECKED.validate_python(found)
    except DureError as error:
        fault = str(error)
    return RunOverview(name=run.name, path=str(run.path), status="unreadable", fault=fault)


def _task_overview(run: RunDir) -> dict[str, Any]:
    spec, end = run.read_spec(), run.read_end()
    status = _status(run, end)
    samples = run.last_samples(0) if status in ("running", "died") else 0
    return {
        "name": run.name,
        "path": str(run.path),
        "status": status,
        "task": spec.task,
        "strategy": spec.strategy if end is None or end.strategy is None else end.strategy,
        "world_size": None if end is None else end.world_size,
        "num_devices": spec.num_devices if end is None or end.num_devices is None else end.num_devices,
        "samples": samples or (0 if end is None else end.samples or 0),
        "best": None if end is None else end.best,
    }


def _script_overview(run: RunDir) -> dict[str, Any]:
    record = run.read_json(SCRIPT)
    return {
        "name": run.name,
        "path": str(run.path),
        "status": _status(run, run.read_end()),
        "task": record["script"],
        "strategy": "script",
        "world_size": record["world_size"],
        "num_devices": record["world_size"],
    }


def _status(run: RunDir, end: RunEnd | None) -> str:
    """Return the status of a run. A summary older than the last attempt belongs to an earlier attempt."""
    if run.is_active():
        return "running"
    return "died" if end is None or _is_of_earlier_attempt(run, end) else end.status


def _is_of_earlier_attempt(run: RunDir, end: RunEnd) -> bool:
    if end.attempts is not None:
        return end.attempts < run.num_attempts()
    # of a version that did not count them
    times = [event.time for event in run.events() if isinstance(event, Attempt)]
    return bool(times) and (run.path / SUMMARY).stat().st_mtime < times[-1] - _CLOCK_SLACK_SECONDS
