"""The runs of a folder: how each stands, whatever became of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from dure.errors import DureError, RunInvalid
from dure.records.events import Attempt
from dure.records.jsonl import last_record
from dure.records.run_dir import SCRIPT, SPEC, SUMMARY, RunDir, saying

_Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]

_CLOCK_SLACK_SECONDS = 0.02
"""File times come from the kernel's coarse clock, up to one tick behind `time.time()`."""


@dataclass(frozen=True, kw_only=True)
class RunOverview:
    """One run as `dure runs` shows it."""

    name: str
    path: str
    status: str
    """`running`, `completed`, `interrupted`, `failed`, `died` (it ended without a word) or `unreadable`."""
    task: str | None = None
    strategy: str | None = None
    world_size: _Count | None = None
    num_devices: _Count | None = None
    samples: _Count | None = None
    best: dict[str, str | _Count | float | None] | None = None
    """Best evaluation, as in the run's summary: `metric`, `value`, `samples_seen`, `checkpoint`."""
    fault: str | None = None
    """Reason why it is `unreadable`."""


_CHECKED = TypeAdapter(RunOverview)


def list_runs(runs_dir: Path) -> list[RunOverview]:
    """Return the runs of a folder by name, which for default names is by date. A damaged one is shown, not fatal.

    Raises:
        RunInvalid: The folder does not exist or cannot be read.
    """
    if not runs_dir.is_dir():
        raise RunInvalid(f"{runs_dir} is no folder: start a run with `dure train`, or point --runs-dir at your runs")
    with saying(runs_dir, "read"):
        paths = sorted(runs_dir.iterdir())
    return [overview(RunDir(path)) for path in paths if _may_be_run(path)]


def _may_be_run(path: Path) -> bool:
    try:
        return RunDir(path).is_script or (path / SPEC).is_file()
    except PermissionError:  # another user's, who alone can tell
        return True


def overview(run: RunDir) -> RunOverview:
    """Return how a run stands; a damaged one is `unreadable`."""
    try:
        with saying(run.path, "read"), run.understood():
            found = _script_overview(run) if run.is_script else _task_overview(run)
            return _CHECKED.validate_python(found)
    except DureError as error:
        fault = str(error)
    return RunOverview(name=run.name, path=str(run.path), status="unreadable", fault=fault)


def _task_overview(run: RunDir) -> dict[str, Any]:
    spec, summary = run.read_spec(), _summary(run)
    status = _status(run, summary)
    last = {} if status not in ("running", "died") else last_record(run.records_path(0))
    return {
        "name": run.name,
        "path": str(run.path),
        "status": status,
        "task": spec.task,
        "strategy": summary.get("strategy", spec.strategy),
        "world_size": summary.get("world_size"),
        "num_devices": summary.get("num_devices", spec.num_devices),
        "samples": last.get("samples_seen", summary.get("samples", 0)),
        "best": summary.get("best"),
    }


def _script_overview(run: RunDir) -> dict[str, Any]:
    record = run.read_json(SCRIPT)
    return {
        "name": run.name,
        "path": str(run.path),
        "status": _status(run, _summary(run)),
        "task": record["script"],
        "strategy": "script",
        "world_size": record["world_size"],
        "num_devices": record["world_size"],
    }


def _summary(run: RunDir) -> Mapping[str, Any]:
    found: Mapping[str, Any] = run.read_json(SUMMARY) if (run.path / SUMMARY).is_file() else {}
    found.get("status")  # nothing but an object has it
    return found


def _status(run: RunDir, summary: Mapping[str, Any]) -> str:
    """Tell how a run stands. A summary older than the last attempt speaks of an attempt before that one."""
    if run.is_active():
        return "running"
    attempts = [event.time for event in run.events() if isinstance(event, Attempt)]
    if not summary or (attempts and (run.path / SUMMARY).stat().st_mtime < attempts[-1] - _CLOCK_SLACK_SECONDS):
        return "died"
    return str(summary["status"]) if "status" in summary else "unreadable"
