"""The verbs as functions: what the command line does, from Python."""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from dure.errors import Interrupted, Misuse, RunInvalid, SpecInvalid, TaskInvalid, WorkerFailed
from dure.hosts import preflight_settings, several_hosts, train_on_nodes
from dure.launch.child import is_worker
from dure.launch.verdict import judge, left_early
from dure.machine import check_devices, resolve_device
from dure.measure.records import RunSummary
from dure.rank import Launched, read_launcher
from dure.report.summary import summarise
from dure.rundir import SPEC, RunDir, saying
from dure.spec import ResolvedSpec, RunSpec, read_toml, resolve
from dure.stopping import end_if_unanswered, stop_exit_code
from dure.strategies import STRATEGIES
from dure.supervised import (
    count_processes,
    finish,
    nothing_half_written,
    run_folder,
    signal_of,
    start_workers,
)
from dure.training.best import Best
from dure.training.load_task import (
    build_task,
    check_task_class,
    load_task_class,
    plain_options,
    register_task_class,
    task_reference,
)
from dure.training.planned_faults import read_faults
from dure.training.task import Task
from dure.under_launcher import train_under_launcher, with_world_size, without_extra_processes

AUTO = "auto"
"""In place of the folder of a run to go on with."""


def train(
    task: "Task | type[Task] | str | None" = None,
    *,
    resume: "Path | str | None" = None,
    config: "Path | str | None" = None,
    **settings: Any,
) -> RunSummary:
    """Train a task, or go on with a run, and return what it came to.

    Args:
        task: A task, its class, or `file.py:Class`.
        resume: A run's folder to go on with, under the same or another strategy and number of devices; `auto` for the
            run of this `name`, if there is one.
        config: A TOML file of settings.
        **settings: Fields of `RunSpec`: `strategy="ddp"`, `nproc=2`, `epochs=3`, ...

    Raises:
        Misuse: Settings, task or data that cannot be.
        EnvironmentLacks: A device or library that was asked for is not here.
        WorkerFailed: Training failed; the message names the first cause.
        Interrupted: A signal stopped it; it can be resumed.
    """
    if is_worker():
        raise Misuse(
            "dure.train is called while a worker process reads the task's file: put that call under "
            "`if __name__ == '__main__':`, so that only the script itself makes it"
        )
    launched = read_launcher()
    if launched is not None:
        settings = with_world_size(settings, launched)
    is_auto = str(resume) == AUTO
    if is_auto:
        resume = _run_to_go_on_with(task, config, settings)
    resolved = resolve_settings(task, resume=resume, config=config, **settings)
    if launched is not None:
        resolved = without_extra_processes(resolved, launched)
    spec = resolved.spec
    several = several_hosts(resolved, launched)
    _check_before_start(spec, launched)
    if spec.preflight:
        from dure.preflight.before_run import refuse_unless_ready  # a start without it is to cost nothing

        refuse_unless_ready(preflight_settings(spec, several, launched, count_processes(spec)), is_quiet=spec.quiet)
    if several is not None:
        return train_on_nodes(resolved, resume, several, is_auto=is_auto)
    if launched is not None:
        return train_under_launcher(resolved, resume, launched, is_auto=is_auto)
    end_if_unanswered()  # torch and the task are imported by now
    run = run_folder(spec, resume)
    with run.lock(), nothing_half_written(run, is_new=resume is None):
        run.write_spec(resolved)
        outcome = start_workers(run, spec, {"kind": "train", "run": str(run.path)})
        return finish(run, spec, outcome)


def evaluate(run: "Path | str", *, which: str = "best", **settings: Any) -> dict[str, Any]:
    """Measure a run's checkpoint on the task's evaluation data, on `nproc` ranks.

    Args:
        run: The run's folder.
        which: `best` or `last`.
        **settings: What is to differ from the run's own settings: `nproc`, `device`, ...

    Returns:
        `metrics` (each with `value` and `count`), `checkpoint`, and the fields of a summary.

    Raises:
        RunInvalid: There is no such run, or it has no checkpoint.
        SpecInvalid: Settings that cannot be.
        WorkerFailed: A rank failed.
        Interrupted: A signal stopped it.
    """
    opened = RunDir.open(Path(run))
    if not opened.has_checkpoints():
        raise RunInvalid(f"{run} has no checkpoint yet: train it further with `dure train --resume {run}`")
    nproc = int(settings.get("nproc") or opened.read_spec().nproc)
    settings = {**settings, "nproc": nproc, "strategy": "ddp" if nproc > 1 else "single"}
    spec = resolve(
        flags=settings, environ={}, config=None, task_defaults={}, strategies=STRATEGIES, base=opened.read_spec()
    ).spec
    _check_before_start(spec)
    answer = f".evaluation-{os.getpid()}.json"
    with saying(opened.path, "written"):  # what comes to it goes through a file there
        (opened.path / answer).touch()
        (opened.path / answer).unlink()
    job = {
        "kind": "evaluate",
        "run": str(opened.path),
        "spec": spec.model_dump(mode="json"),
        "which": which,
        "answer": answer,
    }
    start = time.perf_counter()
    try:
        outcome = start_workers(opened, spec, job)
        stopped_by = signal_of(outcome)
        verdict = judge(opened.path, outcome.ends, stopped_by)
        if verdict is None and stopped_by is not None:
            raise Interrupted("the evaluation was stopped", stop_exit_code(stopped_by))
        if verdict is None and not (opened.path / answer).is_file():
            verdict = left_early(outcome.ends)
        if verdict is not None:
            raise WorkerFailed(verdict.text, verdict.exit_code)
        result = opened.read_json(answer)
    finally:
        (opened.path / answer).unlink(missing_ok=True)
    return _evaluation_record(opened, spec, which, result, time.perf_counter() - start)


def export(run: "Path | str", file: "Path | str", *, which: str = "last") -> dict[str, Any]:
    """Write a run's weights, under the model's own names, into one safetensors file.

    Returns:
        `file`, `num_bytes`, `checkpoint`.
    """
    from dure.training.checkpoint import CheckpointStore, export_weights

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


def resolve_settings(
    task: "Task | type[Task] | str | None" = None,
    *,
    resume: "Path | str | None" = None,
    config: "Path | str | None" = None,
    **settings: Any,
) -> ResolvedSpec:
    """Bring the settings together without starting anything; see `train` for the arguments.

    Raises:
        SpecInvalid: Every setting that cannot be, at once.
        TaskInvalid: The task does not load.
    """
    base = None if resume is None else RunDir.open(Path(resume)).read_spec()
    flags = dict(settings)
    if task is not None:
        flags.update(_task_settings(task, flags.get("start"), flags.get("task_options") or {}))
    config_path = None if config is None else Path(config)
    reference = flags.get("task") or (base.task if base else None) or _task_named_elsewhere(config_path)
    if reference is None:
        raise SpecInvalid(["no task is given: write `dure train file.py:Class`, or --resume a run"])
    cls = load_task_class(reference)
    if "task" in flags:
        flags["task"] = _absolute(flags["task"])
    resolved = resolve(
        flags=flags,
        environ=os.environ,
        config=config_path,
        task_defaults=cls.defaults,
        strategies=STRATEGIES,
        base=base,
    )
    Best(resolved.spec.best_metric, resolved.spec.best_mode)
    return _with_all_options(resolved, cls)


def _run_to_go_on_with(
    task: "Task | type[Task] | str | None", config: "Path | str | None", settings: Mapping[str, Any]
) -> Path | None:
    """Find the run that `--resume auto` means: the one of this name, or none when it is still to begin."""
    spec = resolve_settings(task, config=config, **settings).spec
    if spec.name is None:
        raise SpecInvalid(["resume is auto but the run has no name: add --name, by which it is found again"])
    path = spec.runs_dir / spec.name
    return path if (path / SPEC).is_file() else None


def _with_all_options(resolved: ResolvedSpec, cls: type[Task]) -> ResolvedSpec:
    """Write every option of the task into the spec, defaults too: a default may change before the run is resumed."""
    task = build_task(cls, resolved.spec.task_options)
    options = {**resolved.spec.task_options, **plain_options(task)}
    origin = {**{f"task_options.{name}": "default" for name in options}, **resolved.origin}
    return ResolvedSpec(spec=resolved.spec.model_copy(update={"task_options": options}), origin=origin)


def _task_named_elsewhere(config: Path | None) -> str | None:
    """Look for the task in the environment and the TOML file.

    Raises:
        SpecInvalid: The file cannot be read.
    """
    if "DURE_TASK" in os.environ:
        return os.environ["DURE_TASK"]
    named = None if config is None else read_toml(config).get("task")
    return named if isinstance(named, str) else None


def _absolute(reference: str) -> str:
    where, _, name = reference.rpartition(":")
    return f"{Path(where).resolve()}:{name}" if where.endswith(".py") else reference


def _task_settings(task: "Task | type[Task] | str", start: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(task, str):
        return {"task": task, **({"task_options": dict(options)} if options else {})}
    cls = task if isinstance(task, type) else type(task)
    check_task_class(cls)
    try:
        reference = task_reference(cls)
        register_task_class(cls, reference)
    except TaskInvalid:
        if start not in ("inline", "fork"):
            raise
        reference = register_task_class(cls)
    if isinstance(task, Task):
        options = {**{f.name: getattr(task, f.name) for f in fields(task) if f.init}, **options}  # type: ignore[arg-type]
    return {"task": reference, "task_options": _as_plain(options)}


def _as_plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as JSON values, as the run's record keeps them."""
    try:
        return dict(json.loads(json.dumps(dict(options), default=str), parse_constant=str))
    except ValueError as error:
        raise SpecInvalid([f"a task option cannot be written into the run's record: {error}"]) from None


def _check_before_start(spec: RunSpec, launched: Launched | None = None) -> None:
    """Refuse what can be known to fail before a folder or a process exists."""
    build_task(load_task_class(spec.task), spec.task_options)
    num_here = spec.nproc // spec.num_nodes if launched is None else min(spec.nproc, launched.rank.local_world_size)
    device = resolve_device(spec.device)
    check_devices(device, num_here, shared=spec.share_devices)
    if spec.backend == "nccl" and device in ("cpu", "mps"):
        raise SpecInvalid(
            [f"backend is nccl, which reaches CUDA devices only, but the device here is {device}: use gloo"]
        )
    if spec.faults is not None:
        read_faults(spec.faults, count_processes(spec), on_several_hosts=spec.num_nodes > 1)
    if spec.start == "inline" and count_processes(spec) > 1:
        raise SpecInvalid([f"start is inline but {spec.strategy} on {spec.nproc} needs processes: use fork or spawn"])
    if STRATEGIES[spec.strategy or "single"].checks_model:
        from dure.torchcompat import kept_global_step_hooks  # imports torch

        with kept_global_step_hooks():  # ranks that are forked from here register theirs once more
            _check_model(spec)


def _check_model(spec: RunSpec) -> None:
    """Let the strategy look at the model before any process starts; the worker builds its own.

    Raises:
        SpecInvalid: It cannot take this model; every reason at once.
    """
    import torch

    from dure.strategies import load_strategy
    from dure.training.session import strategy_options

    task = build_task(load_task_class(spec.task), spec.task_options)
    try:
        with torch.device("meta"):
            model = task.build_model()
    except Exception:
        return  # it reads values (pretrained weights): every worker looks at its own
    strategy = load_strategy(spec.strategy or "single")
    faults = strategy.check_model(model, spec.nproc, strategy_options(spec))
    try:
        optimizer = task.build_optimizer(model)
    except Exception:
        optimizer = None  # as above
    if isinstance(optimizer, torch.optim.Optimizer):
        faults += strategy.check_optimizer(optimizer)
    if faults:
        raise SpecInvalid([f"strategy is {spec.strategy}: {fault}" for fault in faults])


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
    run.append_event("evaluation", **record)
    return record
