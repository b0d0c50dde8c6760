"""Jobs of ranks: one record per kind of work, passed by a launcher to the module that does the work."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from dure.checked import record_from_json


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """Training of a run's task, whose settings are in the run's folder."""

    run: str
    """Path of the run's folder."""
    task_code: str | None = None
    """Digest of the task's class in the launcher; None if an external launcher started the rank."""
    asked: Mapping[str, Any] | None = None
    """Facts on which ranks must agree, if a launcher requested each rank separately; None if one process requested all.
    """


@dataclass(frozen=True, kw_only=True)
class EvaluateJob:
    """Evaluation of a run's checkpoint."""

    run: str
    """Path of the run's folder."""
    spec: Mapping[str, Any]
    """Settings, which may differ from the run's own."""
    which: str
    """`best` or `last`."""
    answer: str
    """Name of the result file in the run's folder."""
    task_code: str | None = None
    """Digest of the task's class in the launcher."""


@dataclass(frozen=True, kw_only=True)
class ScriptJob:
    """Run of a script."""

    script: str
    """Path of a file, or name of a module."""
    run: str
    """Name of the run."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    local_rank_argument: str = "auto"
    """Form of the local rank's argument: `auto`, `none`, `dash`, `underscore` or `apex`."""
    max_restarts: int = 0
    role: str = "default"
    num_nodes: int = 1
    records: str | None = None
    """Run folder for records of the steps; None to record none."""
    observer: tuple[str, str] | None = None
    """Module that observes the script, and what its `begin` is given; None for none."""
    trace: int | None = None
    """Number of steps to profile; None for none."""
    face: str | None = None
    """Library whose interface the script finds in dure, such as `horovod`; None for none."""


@dataclass(frozen=True, kw_only=True)
class BenchPlan:
    """Settings of a measurement."""

    collectives: tuple[str, ...]
    algorithms: tuple[str, ...]
    """Algorithms for all_reduce; `auto` is the one that a run would use."""
    sizes: tuple[int, ...]
    """Sizes in bytes."""
    dtype: str
    op: str
    warm_up: int


@dataclass(frozen=True, kw_only=True)
class BenchJob:
    """Measurement of collectives."""

    device: str
    backend: str
    timeout_seconds: float
    rows: str
    """Path of the file for the rows."""
    plan: BenchPlan


@dataclass(frozen=True, kw_only=True)
class PreflightJob:
    """Trial of the collectives of a planned run."""

    progress: tuple[str, ...]
    """Path of a file for each rank of this host."""
    device: str
    num_devices: int
    backend: str
    timeout_seconds: float
    """Timeout of each call, in seconds."""


Job = TrainJob | EvaluateJob | ScriptJob | BenchJob | PreflightJob
_KINDS: Mapping[str, type[Job]] = {kind.__name__: kind for kind in get_args(Job)}


def job_to_json(job: Job) -> dict[str, Any]:
    """Return a job as plain JSON values."""
    return {"kind": type(job).__name__, "job": asdict(job)}


def job_from_json(data: Mapping[str, Any]) -> Job:
    """Rebuild a job from the result of `job_to_json`.

    Raises:
        DocumentInvalid: It is not a job.
    """
    return record_from_json(_KINDS[data["kind"]], data["job"])
