"""The verbs as functions: what the command line does, from Python."""

import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any

from dure.errors import (
    FAILED,
    DureError,
    EnvironmentLacks,
    Interrupted,
    Misuse,
    RunInvalid,
    SpecInvalid,
    TaskInvalid,
    WorkerFailed,
)
from dure.hosts import facts_to_agree_on, several_hosts
from dure.launch.child import Output, is_worker
from dure.launch.hang import tell_of_hang
from dure.launch.log_pump import LogPump
from dure.launch.nodes import Nodes
from dure.launch.rendezvous import NodeSettings, join
from dure.launch.restarts import Restart, RestartPolicy
from dure.launch.shared_folder import meet_in_folder
from dure.launch.supervisor import Outcome, run_workers
from dure.launch.verdict import Verdict, WorkerEnd, judge, left_early, stop_signal
from dure.launch.watchdog import HangPolicy
from dure.launch.workers import Launch
from dure.lifeline import die_with_parent
from dure.machine import check_devices, count_cores, resolve_device
from dure.measure.records import RunSummary
from dure.rank import Launched, Place, RankInfo, StoreAddress, meeting_point, read_launcher
from dure.report.summary import summarise
from dure.rundir import SPEC, SUMMARY, RunDir, default_name
from dure.spec import ResolvedSpec, RunSpec, read_toml, resolve
from dure.stopping import stop_exit_code
from dure.strategies import STRATEGIES
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

_WORKER = "dure.training.worker"
_REFUSED = (Misuse.exit_code, EnvironmentLacks.exit_code)

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
        settings = _with_world_size(settings, launched)
    if str(resume) == AUTO:
        resume = _run_to_go_on_with(task, config, settings)
    resolved = resolve_settings(task, resume=resume, config=config, **settings)
    if launched is not None:
        resolved = _without_extra_processes(resolved, launched)
    spec = resolved.spec
    several = several_hosts(resolved, launched)
    _check_before_start(spec, launched)
    if several is not None:
        return _train_on_nodes(resolved, resume, several)
    if launched is not None:
        return _train_under_launcher(resolved, resume, launched)
    run = _run_folder(spec, resume)
    with run.lock(), _nothing_half_written(run, is_new=resume is None):
        run.write_spec(resolved)
        outcome = _start_workers(run, spec, {"kind": "train", "run": str(run.path)})
        return _finish(run, spec, outcome)


def evaluate(run: "Path | str", *, which: str = "best", **settings: Any) -> dict[str, Any]:
    """Measure a run's checkpoint on the task's evaluation data, on `nproc` ranks.

    Args:
        run: The run's folder.
        which: `best` or `last`.
        **settings: What is to differ from the run's own settings: `nproc`, `device`, ...

    Returns:
        `metrics` (each with `value` and `count`), `checkpoint`, and the fields of a summary.
    """
    opened = RunDir.open(Path(run))
    nproc = int(settings.get("nproc") or opened.read_spec().nproc)
    settings = {**settings, "nproc": nproc, "strategy": "ddp" if nproc > 1 else "single"}
    spec = resolve(
        flags=settings, environ={}, config=None, task_defaults={}, strategies=STRATEGIES, base=opened.read_spec()
    ).spec
    _check_before_start(spec)
    answer = f".evaluation-{os.getpid()}.json"
    job = {
        "kind": "evaluate",
        "run": str(opened.path),
        "spec": spec.model_dump(mode="json"),
        "which": which,
        "answer": answer,
    }
    start = time.perf_counter()
    try:
        outcome = _start_workers(opened, spec, job)
        stopped_by = _signal_of(outcome)
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
    num_here = spec.nproc // spec.nnodes if launched is None else min(spec.nproc, launched.rank.local_world_size)
    check_devices(resolve_device(spec.device), num_here, shared=spec.share_devices)
    if spec.faults is not None:
        read_faults(spec.faults, _num_processes(spec))
    if spec.start == "inline" and _num_processes(spec) > 1:
        raise SpecInvalid([f"start is inline but {spec.strategy} on {spec.nproc} needs processes: use fork or spawn"])
    if STRATEGIES[spec.strategy or "single"].checks_model:
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


def _run_folder(spec: RunSpec, resume: "Path | str | None") -> RunDir:
    if resume is not None:
        return RunDir.open(Path(resume))
    name = spec.name or default_name(spec.task, spec.strategy or "single", datetime.now())
    return RunDir.create(spec.runs_dir, name, or_numbered=spec.name is None)


def _num_processes(spec: RunSpec) -> int:
    info = STRATEGIES[spec.strategy or "single"]
    extra = (getattr(spec, info.extra_processes) or spec.nproc) if info.extra_processes else 0
    return 1 if info.one_process else spec.nproc + extra


def _threads(spec: RunSpec, num_processes: int) -> int:
    return spec.threads or max(1, count_cores() // num_processes)


def _start_workers(run: RunDir, spec: RunSpec, job: Mapping[str, Any], nodes: Nodes | None = None) -> Outcome:
    num_processes = _num_processes(spec) if nodes is None else nodes.me.num_ranks
    ranks = range(num_processes) if nodes is None else range(nodes.first_rank, nodes.first_rank + num_processes)
    for stale in run.path.glob("logs/failure-rank*.json"):
        stale.unlink()
    threads = _threads(spec, num_processes)
    if spec.start == "inline":
        return _run_inline(job, Place(threads=threads, is_supervised=False))
    quiet = [run.log_path(rank) for rank in ranks if rank]
    with closing(LogPump(quiet, is_shown=False)) as pump:
        launch = Launch(
            entry=_WORKER,
            job=job,
            num_processes=num_processes,
            threads=threads,
            outputs=[*([Output()] if ranks[0] == 0 else []), *(Output(descriptors=both) for both in pump.descriptors)],
            # of several nodes each asks its own clock; they have a store of their own for every round
            store_prefix=f"{run.name}/{time.time_ns()}" if nodes is None else run.name,
            start=spec.start,
            expendable=_expendable(spec),
            restarts=_restart_policy(spec, job),
            on_restart=lambda restart: _note_restart(run, restart, spec),
            hangs=HangPolicy(hang_after=spec.hang_after, action=_hang_action(spec)),
            on_hang=lambda hang: tell_of_hang(run if nodes is None or nodes.me.node_rank == 0 else None, hang),
            nodes=nodes,
            pump=pump,
        )
        return run_workers(launch)


def _restart_policy(spec: RunSpec, job: Mapping[str, Any]) -> RestartPolicy:
    """Return how often ranks are started again.

    An evaluation is simply asked for once more. Where ranks can be missed, the end of one that cannot ends the run.
    Snapshots in memory are of one host: a run on several goes on from its checkpoint, with --resume.
    """
    may_restart = job["kind"] == "train" and not _expendable(spec) and spec.nnodes == 1
    most = spec.max_restarts if may_restart else 0
    return RestartPolicy(most=most, window_seconds=spec.restart_window_seconds)


def _hang_action(spec: RunSpec) -> str:
    return "stop" if spec.nnodes > 1 and spec.on_hang == "restart" else spec.on_hang


def _note_restart(run: RunDir, restart: Restart, spec: RunSpec) -> None:
    cause = {"rank": restart.rank, "step": restart.step, "message": restart.cause}
    if restart.microbatch_sizes is None:
        run.append_event("restart", number=restart.number, **cause)
        where = "" if restart.go_back_to is None else ", from where all agreed"
        said = f"restart {restart.number} of {spec.max_restarts}{where}"
    else:
        before, after = restart.microbatch_sizes
        run.append_event("microbatch_halved", **{"from": before, "to": after}, **cause)
        said = (
            f"step {restart.step} is repeated with {after} instead of {before} samples at once on each device; "
            f"the global batch stays {spec.global_batch_size}"
        )
    for stale in run.path.glob("logs/failure-rank*.json"):
        stale.unlink()
    if not spec.quiet:
        with suppress(OSError):
            print(f"dure: {restart.cause}\n      {said}", file=sys.stderr, flush=True)


def _expendable(spec: RunSpec) -> range:
    """Return the ranks that the others go on without: those with a device, where the strategy says so."""
    info = STRATEGIES[spec.strategy or "single"]
    goes_on = info.outlives_ranks_without and not getattr(spec, info.outlives_ranks_without)
    return range(spec.nproc if goes_on else 0)


def _run_inline(job: Mapping[str, Any], place: Place) -> Outcome:
    import torch

    from dure.training.worker import main

    threads = torch.get_num_threads()
    try:
        code = main(job, place)
    finally:
        torch.set_num_threads(threads)  # the process lives on, and is not ours
    return Outcome(ends=[WorkerEnd(rank=0, exit_code=code, time=time.time(), was_stopped=False)], signal=None)


def _signal_of(outcome: Outcome) -> int | None:
    """Return the signal that stopped the run, sent to the supervisor or to a rank."""
    return outcome.signal if outcome.signal is not None else stop_signal(outcome.ends)


def _finish(run: RunDir, spec: RunSpec, outcome: Outcome, *, is_own: bool = True) -> RunSummary:
    """Write the summary, whatever came of the run, and raise what is not success.

    Args:
        run: Its folder.
        spec: What was run.
        outcome: How the ranks ended.
        is_own: Whether this launcher writes the run's records; otherwise another node's does.
    """
    stopped_by = _signal_of(outcome)
    verdict = judge(run.path, outcome.ends, stopped_by)
    error: DureError | None = None
    status = "completed"
    if verdict is None and not _ended_complete(run):
        if stopped_by is not None:
            status = "interrupted"
            error = Interrupted(f"stopped; continue with `dure train --resume {run.path}`", stop_exit_code(stopped_by))
        else:
            verdict = left_early(outcome.ends)
    if outcome.lost is not None:
        text = f"{outcome.lost}; `dure train --resume {run.path}` goes on from the last checkpoint"
        verdict = Verdict(text=text, exit_code=FAILED, first=None)
    elif outcome.hang is not None:
        text = f"the ranks were ended because they hung (--on-hang); `dure train --resume {run.path}` goes on"
        verdict = Verdict(text=text, exit_code=FAILED, first=None)
    if verdict is not None:
        status = "failed"
        refusal = "" if outcome.refusal is None else f"\n{outcome.refusal}"
        error = WorkerFailed(verdict.text + refusal, verdict.exit_code)
    summary = summarise(run, spec, status, None if error is None else str(error))
    if not is_own:
        if error is not None:
            raise error
        return summary
    if error is None:
        run.write_json(SUMMARY, summary.to_json())
        return summary
    if error.exit_code in _REFUSED and (summary.steps == 0 or not _has_begun(run)):
        raise error
    run.append_event(status, message=str(error))
    run.write_json(SUMMARY, summary.to_json())
    raise error


def _ended_complete(run: RunDir) -> bool:
    last = None
    for event in run.events():
        if event["event"] in ("attempt", "completed", "interrupted"):
            last = event["event"]
    return last == "completed"


@contextmanager
def _nothing_half_written(run: RunDir, *, is_new: bool) -> Iterator[None]:
    """Undo what a refused start wrote: a new run's folder goes, a resumed run's records are put back."""
    before = {} if is_new else {name: run.read_json(name) for name in (SPEC, SUMMARY) if (run.path / name).is_file()}
    try:
        yield
    except DureError as error:
        if error.exit_code in _REFUSED:
            if is_new:
                run.discard()
            elif not _has_begun(run):
                for name, record in before.items():
                    run.write_json(name, record)
        raise


def _has_begun(run: RunDir) -> bool:
    """Whether the last attempt got as far as training."""
    has_begun = False
    for event in run.events():
        if event["event"] in ("attempt", "training"):
            has_begun = event["event"] == "training"
    return has_begun


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


def _with_world_size(settings: dict[str, Any], launched: Launched) -> dict[str, Any]:
    """Let the launcher decide how many processes there are."""
    by, world_size = launched.by, launched.rank.world_size
    if world_size == 1:
        return settings
    said = settings.get("nproc")
    if said is not None and int(said) != world_size:
        raise SpecInvalid([f"nproc is {said} but {by} started {world_size} processes: leave --nproc out, {by} decides"])
    return {**settings, "nproc": world_size}


def _without_extra_processes(resolved: ResolvedSpec, launched: Launched) -> ResolvedSpec:
    """Count as devices only those of the launcher's processes that have one: the last ones may be servers."""
    spec, by, world_size = resolved.spec, launched.by, launched.rank.world_size
    setting = STRATEGIES[spec.strategy or "single"].extra_processes
    if not setting or world_size == 1:
        return resolved
    extra = getattr(spec, setting)
    if (extra is None and world_size % 2) or (extra or 0) >= world_size:
        counted = "as many as there are others" if extra is None else str(extra)
        raise SpecInvalid(
            [
                f"{by} started {world_size} processes, of which {setting} is to be {counted}: start more, or "
                f"set --{setting}"
            ]
        )
    nproc = world_size - (extra or world_size // 2)
    return ResolvedSpec(spec=spec.model_copy(update={"nproc": nproc}), origin={**resolved.origin, "nproc": by})


def _train_on_nodes(resolved: ResolvedSpec, resume: "Path | str | None", several: NodeSettings) -> RunSummary:
    """Train with the ranks of this host, beside those of others.

    Raises:
        RunInvalid: A node does not see the run's folder: each rank writes its share of a checkpoint there.
    """
    spec = resolved.spec
    facts = facts_to_agree_on(spec, is_resumed=resume is not None)

    def refuse(name: str) -> RunDir:
        raise RunInvalid(
            f"node {several.node_rank} ({platform.node()}) does not see the run's folder {name}, which node 0 made: "
            "put --runs-dir on a file system that all nodes share, under the same path, for every rank writes its "
            "share of the checkpoints there"
        )

    job = {"kind": "train"}
    with join(several, facts, spec.nproc // spec.nnodes) as nodes:
        met = meet_in_folder(nodes, lambda: _run_folder(spec, resume), refuse, is_new=resume is None)
        run = met.run
        if not met.is_own:
            nodes.gather(None)  # node 0 has written the spec, which ranks read
            outcome = _start_workers(run, spec, {**job, "run": str(run.path)}, nodes)
            return _finish(run, spec, outcome, is_own=False)
        with run.lock(), _nothing_half_written(run, is_new=resume is None):
            run.write_spec(resolved)
            nodes.gather(None)
            return _finish(run, spec, _start_workers(run, spec, {**job, "run": str(run.path)}, nodes))


def _train_under_launcher(resolved: ResolvedSpec, resume: "Path | str | None", launched: Launched) -> RunSummary:
    """Be one rank of a run whose processes a launcher started."""
    from dure.training.worker import main

    spec, rank = resolved.spec, launched.rank
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())  # torchrun's agent, killed, would leave its ranks training
    if spec.on_divergence == "heal":
        raise SpecInvalid(
            [
                "on_divergence is heal, which starts all ranks again where they agreed, but torchrun started these: "
                "choose stop, or start them with dure train --nproc"
            ]
        )
    if STRATEGIES[spec.strategy or "single"].one_process:
        raise SpecInvalid(
            [f"strategy is {spec.strategy} but {launched.by} started {rank.world_size} process(es): use --strategy ddp"]
        )
    run, store = _meet(resolved, resume, launched)
    threads = spec.threads or launched.cores or _threads(spec, rank.local_world_size)
    place = Place(rank=rank, store=store, threads=threads, is_supervised=False)
    job = {"kind": "train", "run": str(run.path)}
    with run.lock() if rank.rank == 0 else nullcontext(), _variables(rank.to_environment()):
        return _judged_alone(run, spec, main(job, place), rank)


def _meet(
    resolved: ResolvedSpec, resume: "Path | str | None", launched: Launched
) -> tuple[RunDir, StoreAddress | None]:
    """Meet the other ranks and learn from rank 0 which folder is the run's."""

    def open_folder() -> dict[str, str]:
        try:
            run = _run_folder(resolved.spec, resume)
            run.write_spec(resolved)
        except DureError as error:
            return {"error": str(error)}
        return {"run": str(run.path)}

    rank, store = launched.rank, None
    if rank.world_size == 1:
        told = open_folder()
    else:
        from dure.comm.meeting import Meeting

        meeting = Meeting(rank, meeting_point(launched), timeout_seconds=resolved.spec.timeout_seconds)
        told, store = meeting.tell_all("run", open_folder if rank.rank == 0 else None), meeting.address
    if "error" in told:
        raise RunInvalid(told["error"])
    return RunDir.open(Path(told["run"])), store


@contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while: torchrun's, which user code reads under any launcher."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _judged_alone(run: RunDir, spec: RunSpec, exit_code: int, rank: RankInfo) -> RunSummary:
    """Raise what this rank ended with; the launcher judges over all ranks."""
    outcome = Outcome(
        ends=[WorkerEnd(rank=rank.rank, exit_code=exit_code, time=time.time(), was_stopped=False)], signal=None
    )
    if rank.rank == 0:
        return _finish(run, spec, outcome)
    verdict = judge(run.path, outcome.ends)
    if verdict is not None:
        raise WorkerFailed(verdict.text, verdict.exit_code)
    if stop_signal(outcome.ends) is not None:
        raise Interrupted(f"rank {rank.rank} was stopped", exit_code)
    return summarise(run, spec, "completed")
