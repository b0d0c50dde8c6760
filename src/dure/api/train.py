"""Functions for training, evaluation and export from Python, with the behaviour of the command line."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dure.api.external_launcher import total_devices, train_under_launcher, with_world_size, without_extra_processes
from dure.api.local import (
    count_processes,
    notes_on,
    start_workers,
)
from dure.api.multi_node import preflight_settings, several_hosts, train_on_hosts
from dure.api.preconditions import check_before_start
from dure.api.settings import absolute, check_same_task, print_notes, settle
from dure.api.trust import check_trusted, is_true
from dure.cluster.rank import Launched, read_launcher
from dure.errors import Interrupted, Misuse, RunInvalid, SpecInvalid, TaskInvalid, WorkerFailed
from dure.failures.verdict import left_early
from dure.launch.nodes.peers import Nodes
from dure.launch.worker.child import is_worker
from dure.own_files import touch
from dure.process.jobs import EvaluateJob
from dure.process.stop_signals import end_if_unanswered, stop_exit_code
from dure.records.events import Evaluation
from dure.records.run_dir import SPEC, RunDir, os_errors_as_sentences
from dure.records.step_record import Metric, RunSummary
from dure.report.summary import summarise
from dure.spec import (
    EVALUATION_FIELDS,
    SETTINGS,
    TABLES,
    ResolvedSpec,
    RunSpec,
    flag_name,
    resolve,
    unknown_setting,
    with_own_names,
)
from dure.spec.arguments import errors_in_arguments
from dure.spec.old_names import SETTINGS as OLD_SETTINGS
from dure.spec.old_names import STRATEGIES_WITH
from dure.strategies.table import STRATEGIES
from dure.training.task.given_task import given_task, giving
from dure.training.task.load_task import task_being_imported
from dure.training.task.task import Task

AUTO = "auto"
"""Value of `resume` in place of a folder: resume the run of this name if it has begun."""


@errors_in_arguments()
def train(
    task: "Task | type[Task] | str | None" = None,
    *,
    resume: "Path | str | None" = None,
    config: "Path | str | None" = None,
    **settings: Any,
) -> RunSummary:
    """Train a task, or resume a run, and return its summary.

    Args:
        task: A task, its class, or `file.py:Class`.
        resume: Folder of a run to resume, under the same or another strategy and number of devices; `auto` for the run
            of this `name`, if there is one.
        config: TOML file of settings.
        **settings: Fields of `RunSpec`: `strategy="ddp"`, `nproc=2`, `epochs=3`, ...

    Raises:
        Misuse: Settings, task or data are invalid.
        EnvironmentLacks: A requested device or library is not available.
        WorkerFailed: Training failed; the message names the first cause.
        Interrupted: A signal stopped training, which can be resumed.
    """
    _refuse_during_import("dure.train")
    launched = read_launcher()
    if launched is not None:
        settings = with_world_size(settings, launched)
    with giving(task):
        return _train(task, resume, config, settings, launched)


def _refuse_during_import(call: str) -> None:
    where = "a worker process reads the task's file" if is_worker() else None
    if (imported := task_being_imported()) is not None:
        where = f"{imported} is imported"
    if where is not None:
        raise TaskInvalid(
            f"{call} is called while {where}: put that call under `if __name__ == '__main__':`, so that only the "
            "script itself makes it"
        )


def _train(
    task: "Task | type[Task] | str | None",
    resume: "Path | str | None",
    config: "Path | str | None",
    settings: Mapping[str, Any],
    launched: Launched | None,
) -> RunSummary:
    is_auto, total = str(resume) == AUTO, total_devices(launched)
    if is_auto:
        resume = _run_to_go_on_with(settle(task, resume=None, config=config, settings=settings, total_devices=total))
    resolved = settle(task, resume=resume, config=config, settings=settings, total_devices=total)
    if launched is not None:
        resolved = without_extra_processes(resolved, launched)
    spec = resolved.spec
    if launched is None or launched.rank.rank == 0:
        print_notes(resolved)
    several = several_hosts(resolved, launched)
    check_before_start(spec, launched)
    if spec.preflight:
        from dure.preflight.before_run import refuse_unless_ready  # imported only if needed, to keep other starts fast

        refuse_unless_ready(preflight_settings(spec, several, launched, count_processes(spec)), is_quiet=spec.quiet)
    if launched is not None:
        return train_under_launcher(resolved, resume, launched, is_auto=is_auto)
    end_if_unanswered()  # torch and the task are imported by now
    return train_on_hosts(resolved, resume, several, is_auto=is_auto)


@errors_in_arguments()
def evaluate(
    run: "Path | str", *, task: "Task | type[Task] | str | None" = None, which: str = "best", **settings: Any
) -> dict[str, Any]:
    """Evaluate a run's checkpoint on the task's evaluation data, on `nproc` ranks.

    Args:
        run: Folder of the run.
        task: Task of the run, its class, or `file.py:Class`. An object or a class is required if the run's record
            cannot restore it (a class from a notebook, attributes set by hand). Any form is required if its file is
            outside the current folder, unless `trust_task` is set.
        which: `best` or `last`.
        **settings: Execution settings that differ from the run's own: `nproc`, `device`, `precision`, `backend`,
            `num_workers`, `eval_batch_size`, ... The ranks run on this host.

    Returns:
        `metrics` (each with `value` and `count`), `checkpoint`, `changed` (code and data that have changed since it was
            saved), and the fields of a summary.

    Raises:
        RunInvalid: There is no such run, or it has no checkpoint.
        SpecInvalid: Settings are invalid.
        WorkerFailed: A rank failed.
        Interrupted: A signal stopped the evaluation.
    """
    _refuse_during_import("dure.evaluate")
    opened, settings = RunDir.open(Path(run)), with_own_names(settings)
    if not opened.has_checkpoints():
        raise RunInvalid(f"{run} has no checkpoint yet: train it further with `{opened.resume_command}`")
    _check_evaluation_settings(settings)
    record = opened.task_object()
    if record is not None and (task is None or isinstance(task, str)):
        raise RunInvalid(
            f"only the Python program that began {run} can evaluate it, because {record['because']}: pass the task "
            f"there again, as dure.evaluate({str(run)!r}, task=task)"
        )
    with giving(task) as given:
        if given is not None:
            check_same_task(given, opened)
        return _evaluate(opened, which, settings, task if isinstance(task, str) else None)


def _check_evaluation_settings(settings: Mapping[str, Any]) -> None:
    """Refuse settings that an evaluation would ignore."""
    faults = [
        f"{flag_name(name)} is given, but an evaluation takes it from the run: leave it out"
        if name in (*SETTINGS, *TABLES, *STRATEGIES_WITH, *OLD_SETTINGS) or name in STRATEGIES
        else unknown_setting("setting", name, EVALUATION_FIELDS, flag_name)
        for name in settings
        if name not in EVALUATION_FIELDS
    ]
    if faults:
        raise SpecInvalid(faults)


def _evaluate(opened: RunDir, which: str, settings: Mapping[str, Any], named: str | None) -> dict[str, Any]:
    base, given = opened.read_spec(), given_task()
    nproc = settings.get("nproc") or base.nproc
    settings = {**settings, "nproc": nproc, "strategy": "single" if str(nproc).strip() == "1" else "ddp"}
    if given is not None or named is not None:
        settings["task"] = given.reference if given is not None else absolute(str(named))
    else:
        trust = settings.get("trust_task", os.environ.get("DURE_TRUST_TASK"))
        check_trusted(base.task, opened, "eval", is_trusted=is_true(trust))
    spec = resolve(flags=settings, environ={}, config=None, task_defaults={}, strategies=STRATEGIES, base=base).spec
    check_before_start(spec)
    answer = f".evaluation-{os.getpid()}.json"
    with os_errors_as_sentences(opened.path, "written"):  # the result is returned through a file in it
        touch(opened.path / answer)
        (opened.path / answer).unlink()
    job = EvaluateJob(run=str(opened.path), spec=spec.model_dump(mode="json"), which=which, answer=answer)
    start = time.perf_counter()
    try:
        nodes = Nodes.alone(count_processes(spec))
        outcome = start_workers(notes_on(opened, spec, nodes, max_restarts=0), spec, job)
        verdict = outcome.judge(opened.path)
        if verdict is None and outcome.stopped_by is not None:
            raise Interrupted("the evaluation was stopped", stop_exit_code(outcome.stopped_by))
        if verdict is None and not (opened.path / answer).is_file():
            verdict = left_early(outcome.ends)
        if verdict is not None:
            raise WorkerFailed(verdict.text, verdict.exit_code)
        result = opened.read_json(answer)
    finally:
        (opened.path / answer).unlink(missing_ok=True)
    return _evaluation_record(opened, spec, which, result, time.perf_counter() - start)


@errors_in_arguments()
def export(run: "Path | str", file: "Path | str", *, which: str = "last") -> dict[str, Any]:
    """Write a run's weights, under the model's own names, into one safetensors file.

    Returns:
        `file`, `num_bytes`, `checkpoint`.
    """
    from dure.training.checkpoints.reader import export_weights
    from dure.training.checkpoints.store import CheckpointStore

    opened = RunDir.open(Path(run))
    if Path(file).suffix != ".safetensors":
        raise Misuse(f"{file} would not be what its name says: weights are written as .safetensors, so name it so")
    warnings: list[str] = []
    store = CheckpointStore(opened.checkpoints, 1, warnings.append)
    path = store.best() if which == "best" else store.newest_valid()
    if path is None:
        raise RunInvalid(f"{opened.path} has no usable checkpoint: {'; '.join(warnings) or 'none was saved yet'}")
    try:
        num_bytes = export_weights(path, Path(file))
    except OSError as error:
        raise Misuse(f"{file} cannot be written ({error.strerror}): give a file in a folder that is there") from None
    return {"file": str(file), "num_bytes": num_bytes, "checkpoint": path.name, "warnings": warnings}


@errors_in_arguments()
def resolve_settings(
    task: "Task | type[Task] | str | None" = None,
    *,
    resume: "Path | str | None" = None,
    config: "Path | str | None" = None,
    **settings: Any,
) -> ResolvedSpec:
    """Resolve the settings without starting anything; see `train` for the arguments.

    Raises:
        SpecInvalid: Settings are invalid; the message lists all of them.
        TaskInvalid: The task cannot be loaded.
    """
    with giving(task):
        return settle(task, resume=resume, config=config, settings=settings)


def _run_to_go_on_with(resolved: ResolvedSpec) -> Path | None:
    """Return the run that `--resume auto` refers to, which has this name; None if it has not begun yet."""
    spec = resolved.spec
    if spec.name is None:
        raise SpecInvalid(["resume is auto but the run has no name: add --name, by which it is found again"])
    path = spec.runs_dir / spec.name
    return path if (path / SPEC).is_file() else None


def _evaluation_record(
    run: RunDir, spec: RunSpec, which: str, result: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
    summary = summarise(run, spec, "completed")
    num_samples = max((metric["count"] for metric in result["metrics"].values()), default=0)
    record = {
        "run": str(run.path),
        "status": "completed",
        "which": which,
        "checkpoint": result["checkpoint"],
        "changed": result["changed"],
        "strategy": spec.strategy,
        "world_size": result["world_size"],
        "num_devices": result["num_devices"],
        "steps": result["step"],
        "samples": result["samples_seen"],
        "epochs": summary.epochs,
        "final_loss": summary.final_loss,
        "metrics": result["metrics"],
        "best": summary.best,
        "wall_seconds": seconds,
        "samples_per_second": num_samples / seconds,
    }
    metrics = {name: Metric(**metric) for name, metric in result["metrics"].items()}
    run.append_event(Evaluation(**{**record, "metrics": metrics}))
    return record
