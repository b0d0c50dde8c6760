"""The runs of a folder: how each stands, whatever became of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dure.errors import DureError, RunInvalid
from dure.record_lines import last_record
from dure.rundir import SCRIPT, SPEC, SUMMARY, RunDir, saying

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
    world_size: int | None = None
    num_devices: int | None = None
    samples: int | None = None
    best: dict[str, Any] | None = None
    """As in the run's summary: `metric`, `value`, `samples_seen`, `checkpoint`."""
    fault: str | None = None
    """Why it is `unreadable`."""


def list_runs(runs_dir: Path) -> list[RunOverview]:
    """Return the runs of a folder by name, which for default names is by date. A damaged one is shown, not fatal.

    Raises:
        RunInvalid: The folder does not exist or cannot be read.
    """
    if not runs_dir.is_dir():
        raise RunInvalid(f"{runs_dir} is no folder: start a run with `dure train`, or point --runs-dir at your runs")
    with saying(runs_dir, "read"):
        paths = sorted(path for path in runs_dir.iterdir() if RunDir(path).is_script or (path / SPEC).is_file())
    return [overview(RunDir(path)) for path in paths]


def overview(run: RunDir) -> RunOverview:
    """Return how a run stands; a damaged one is `unreadable`."""
    try:
        if run.is_script:
            return _script_overview(run)
        spec = run.read_spec()
        summary = run.read_json(SUMMARY) if (run.path / SUMMARY).is_file() else {}
        status = _status(run, summary)
        last = {} if status not in ("running", "died") else last_record(run.records_path(0))
        return RunOverview(
            name=run.name,
            path=str(run.path),
            status=status,
            task=spec.task,
            strategy=summary.get("strategy", spec.strategy),
            world_size=summary.get("world_size"),
            num_devices=summary.get("num_devices", spec.nproc),
            samples=last.get("samples_seen", summary.get("samples", 0)),
            best=summary.get("best"),
        )
    except DureError as error:
        fault = str(error)
    except (AttributeError, TypeError, KeyError):
        fault = "its records are damaged or of another version of dure"
    return RunOverview(name=run.name, path=str(run.path), status="unreadable", fault=fault)


def _script_overview(run: RunDir) -> RunOverview:
    record = run.read_json(SCRIPT)
    summary = run.read_json(SUMMARY) if (run.path / SUMMARY).is_file() else {}
    return RunOverview(
        name=run.name,
        path=str(run.path),
        status=_status(run, summary),
        task=record["script"],
        strategy="script",
        world_size=record["world_size"],
        num_devices=record["world_size"],
    )


def _status(run: RunDir, summary: Mapping[str, Any]) -> str:
    """Tell how a run stands. A summary older than the last attempt speaks of an attempt before that one."""
    if run.is_active():
        return "running"
    attempts = [event["time"] for event in run.events() if event.get("event") == "attempt"]
    if not summary or (attempts and (run.path / SUMMARY).stat().st_mtime < attempts[-1] - _CLOCK_SLACK_SECONDS):
        return "died"
    return str(summary["status"]) if "status" in summary else "unreadable"
