"""Settings of a run together with its task: its reference, its options, and the task of a resumed run."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dure.api.trust import check_trusted, is_true
from dure.errors import RunInvalid, SpecInvalid
from dure.records.run_dir import RunDir
from dure.spec import ENVIRONMENT_PREFIX, ResolvedSpec, RunSpec, read_toml, resolve, same_task
from dure.spec.arguments import in_callers_syntax
from dure.strategies.table import STRATEGIES
from dure.terminal import print_status
from dure.training.best_metric import Best
from dure.training.task.given_task import GivenTask, given_task, task_class
from dure.training.task.options import build_task, is_same, options_of, task_options, to_json
from dure.training.task.task import Task


def settle(
    task: "Task | type[Task] | str | None",
    *,
    resume: "Path | str | None",
    config: "Path | str | None",
    settings: Mapping[str, Any],
    total_devices: int | None = None,
) -> ResolvedSpec:
    """Resolve the settings of a run; a task object or class must be passed through `giving` meanwhile.

    Args:
        task: Reference of the task if none is passed.
        resume: Folder of a run to resume; None for a new run.
        config: TOML file of settings; None for none.
        settings: Settings of the call.
        total_devices: Devices of all hosts, if a launcher determines them and they are not `nproc` for each.

    Raises:
        SpecInvalid: Settings are invalid; the message lists all of them.
        TaskInvalid: The task cannot be loaded.
        RunInvalid: Only the program that started the run has its task.
    """
    given = given_task()
    run = None if resume is None else RunDir.open(Path(resume))
    base = None if run is None else run.read_spec()
    record = None if run is None else run.task_object()
    if run is not None and record is not None and given is None:
        raise RunInvalid(
            f"only the Python program that began {run.path} can go on with it, because {record['because']}: pass the "
            f"task there again, as dure.train(task, resume={str(run.path)!r})"
        )
    flags = dict(settings)
    if given is not None:
        flags["task"] = given.reference
        if given.task is not None and flags.get("task_options"):
            raise SpecInvalid(
                [f"task_options are for a class, but an object is passed: give it them, as {given.cls.__name__}(...)"]
            )
    elif task is not None:
        flags["task"] = task
    config_path = None if config is None else Path(config)
    named = _named_elsewhere("task", config_path)
    reference = flags.get("task") or (base.task if base else None) or named
    if reference is None:
        raise SpecInvalid(["no task is given: write `dure train file.py:Class`, or --resume a run"])
    if run is not None and base is not None and "task" not in flags and not same_task(str(named), base.task):
        trust = flags.get("trust_task", _named_elsewhere("trust_task", config_path))
        check_trusted(base.task, run, "train", is_trusted=is_true(trust))
    cls = task_class(reference)
    if "task" in flags:
        flags["task"] = absolute(flags["task"])
    if given is not None and given.task is not None:
        flags["task_options"] = given.options
    elif flags.get("task_options"):
        flags["task_options"] = _as_json(cls, flags["task_options"])
    resolved = resolve(
        flags=flags,
        environ=os.environ,
        config=config_path,
        task_defaults=cls.defaults,
        strategies=STRATEGIES,
        base=base,
        total_devices=total_devices,
    )
    Best(resolved.spec.best_metric, resolved.spec.best_mode)
    return _with_task(resolved, cls, given, base, record)


def print_notes(resolved: ResolvedSpec) -> None:
    """Print notes on the names of settings, in the terms of the caller."""
    if not resolved.spec.quiet:
        for note in resolved.notes:
            print_status(in_callers_syntax(note))


def check_same_task(given: GivenTask, run: RunDir) -> None:
    """Refuse a task other than the one that a run was trained with.

    Raises:
        SpecInvalid: They differ; the message names the differences.
    """
    spec, faults = run.read_spec(), []
    if not same_task(given.reference, spec.task):
        faults.append(f"the task that is passed is {given.reference} but the run was begun with {spec.task}: pass that")
    options = dict(spec.task_options) if given.task is None else dict(given.options)
    faults += [
        f"task option {name} is {options.get(name)!r} but the run was begun with {spec.task_options.get(name)!r}: "
        "pass the task with that"
        for name in sorted({*options, *spec.task_options})
        if options.get(name) != spec.task_options.get(name)
    ]
    faults = faults or given.faults_since(run.task_object(), options)
    if faults:
        raise SpecInvalid(faults)


def _with_task(
    resolved: ResolvedSpec,
    cls: type[Task],
    given: GivenTask | None,
    base: RunSpec | None,
    record: Mapping[str, Any] | None,
) -> ResolvedSpec:
    """Write all options of the task into the spec, including defaults, which may change before a resume."""
    if given is not None and given.task is not None:
        options = dict(given.options)
    else:
        made = build_task(cls, resolved.spec.task_options)
        options = {**resolved.spec.task_options, **options_of(made)[0]}
    if base is not None and given is not None:
        faults = given.faults_since(record, options)
        if faults:
            raise SpecInvalid(faults)
    origin = {**{f"task_options.{name}": "default" for name in options}, **resolved.origin}
    task_object = None if given is None else given.record()
    if task_object is not None and given is not None and given.task is None and record is not None:
        task_object = {**task_object, "attributes": record["attributes"]}
    spec = resolved.spec.model_copy(update={"task_options": options})
    return replace(resolved, spec=spec, origin=origin, task_object=task_object)


def _as_json(cls: type[Task], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as JSON values for the run's record; text and invalid values are left unchanged.

    Raises:
        SpecInvalid: JSON cannot hold a value.
    """
    known, plain, faults = task_options(cls), {}, []
    for name, value in options.items():
        try:
            plain[name] = to_json(known[name], value) if name in known and not isinstance(value, str) else value
        except ValueError:
            if not _is_json(value):
                faults.append(
                    f"task option {name} is {value!r:.60}, which a run's record cannot hold: pass the task itself, as "
                    f"{cls.__name__}({name}=...)"
                )
            plain[name] = value
    if faults:
        raise SpecInvalid(faults)
    return plain


def _is_json(value: Any) -> bool:
    try:
        return is_same(json.loads(json.dumps(value)), value)
    except (TypeError, ValueError, RecursionError):
        return False


def _named_elsewhere(name: str, config: Path | None) -> Any:
    """Return a setting from the environment or the TOML file; None if it is in neither.

    Raises:
        SpecInvalid: The file cannot be read.
    """
    variable = f"{ENVIRONMENT_PREFIX}{name.upper()}"
    if os.environ.get(variable):
        return os.environ[variable]
    return None if config is None else read_toml(config).get(name)


def absolute(reference: str) -> str:
    """Return the reference of a task in a form that is valid in any folder."""
    where, _, name = reference.rpartition(":")
    return f"{Path(where).resolve()}:{name}" if where.endswith(".py") else reference
