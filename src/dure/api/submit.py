"""`dure submit` as functions: checks before a cluster sees the job, and the form of the job for each cluster."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from dure.api.settings import print_notes
from dure.api.trust import check_trusted, is_true
from dure.errors import Misuse, SpecInvalid
from dure.records.run_dir import RunDir, check_name, default_name
from dure.spec import RunSpec, flag_name, resolve, unknown_name
from dure.strategies.table import STRATEGIES
from dure.submit import kubernetes, slurm
from dure.submit import ray as ray_cluster
from dure.submit.job import Job, seconds_of
from dure.terminal import one_line

TARGETS = ("slurm", "kubernetes", "ray")

RUNS_IN_POD = Path("/runs")
"""Mount point of a claim in each pod, unless --runs-dir names another."""

_OF_TARGETS: Mapping[str, tuple[str, ...]] = {
    "time": ("slurm", "kubernetes"),
    "partition": ("slurm",),
    "grace_seconds": ("slurm",),
    "sbatch": ("slurm",),
    "image": ("kubernetes",),
    "kind": ("kubernetes",),
    "namespace": ("kubernetes",),
    "runtime": ("kubernetes",),
    "claim": ("kubernetes",),
    "address": ("ray",),
}
"""Clusters that support a setting, for settings that only some support."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Arguments for the call of `dure train` in the job."""

    task: str | None = None
    resume: Path | None = None
    config: Path | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the task."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `RunSpec` as written by the user, and a table of options for each strategy that has some."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """Resources requested from a cluster; None leaves the choice to it."""

    to: str
    name: str | None = None
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    gpus_per_task: int = 0
    python: str | None = None
    time: str | None = None
    partition: str | None = None
    grace_seconds: int | None = None
    sbatch: tuple[str, ...] = ()
    image: str | None = None
    kind: str | None = None
    namespace: str | None = None
    runtime: str | None = None
    claim: str | None = None
    address: str | None = None


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Job in the form that its cluster receives."""

    to: str
    job: Job
    text: str = ""
    """Batch script, or manifests."""
    plan: "ray_cluster.Plan | None" = None

    def send(self) -> str:
        """Submit the job, and return the cluster's output: a job number, or what was applied.

        A run on Ray is not submitted but run: this returns when it has ended.

        Raises:
            EnvironmentLacks: The cluster's command is not available here.
            SubmissionRefused: The cluster refuses the job.
            WorkerFailed: On Ray, a rank failed.
            Interrupted: On Ray, a signal stopped the run.
        """
        if self.plan is not None:
            ray_cluster.run(self.plan)
            return "completed"
        return slurm.submit(self.text) if self.to == "slurm" else kubernetes.apply(self.text)


def prepare(training: Training, wishes: Wishes, *, now: datetime | None = None) -> Submission:
    """Prepare a submission, or refuse it.

    The task itself is not loaded, because it may exist only on the cluster.

    Raises:
        Misuse: The requested resources are invalid.
        SpecInvalid: Settings of the training are invalid; the message lists all of them.
        RunInvalid: There is no such run to resume.
    """
    _check_wishes(wishes)
    spec = _check_training(training, wishes)
    job = _job(training, wishes, spec, now or datetime.now())
    if wishes.to == "slurm":
        grace = {} if wishes.grace_seconds is None else {"grace_seconds": wishes.grace_seconds}
        options = slurm.SlurmOptions(partition=wishes.partition, lines=wishes.sbatch, **grace)
        return Submission(to=wishes.to, job=job, text=slurm.script(job, options))
    if wishes.to == "kubernetes":
        pods = _kubernetes_options(wishes)
        kubernetes.check_names(job, pods)
        return Submission(to=wishes.to, job=job, text=kubernetes.to_yaml(kubernetes.manifests(job, pods)))
    plan = ray_cluster.Plan(job=job, address=wishes.address)
    return Submission(to=wishes.to, job=job, plan=plan)


# --- checks


def _check_wishes(wishes: Wishes) -> None:
    if wishes.to not in TARGETS:
        raise Misuse(unknown_name("cluster", wishes.to, TARGETS))
    for name, targets in _OF_TARGETS.items():
        if getattr(wishes, name) not in (None, ()) and wishes.to not in targets:
            flag = flag_name(name)
            raise Misuse(f"{flag} is given but {wishes.to} has no such thing: leave it out, or use --to {targets[0]}")
    least = {"nodes": 1, "tasks_per_node": 1, "cpus_per_task": 1, "gpus_per_task": 0, "grace_seconds": 0}
    for name, bound in least.items():
        number = getattr(wishes, name)
        if number is not None and not bound <= number <= 100_000:
            raise Misuse(f"{flag_name(name)} is {number} but must be a whole number from {bound} to 100000")
    for line in wishes.sbatch:
        slurm.check_line(line)
    if wishes.partition is not None and not re.fullmatch(r"[\w.,-]+", wishes.partition):
        raise Misuse(f"--partition is {wishes.partition!r} but must be a partition's name, or several with commas")
    if wishes.to == "kubernetes" and wishes.image is None:
        raise Misuse("--to kubernetes needs --image: a container image that has dure and the task")
    if wishes.kind not in (None, "trainjob", "job"):
        raise Misuse(f"--kind is {wishes.kind!r} but must be one of trainjob, job")
    if wishes.runtime is not None and wishes.kind == "job":
        raise Misuse("--runtime is given but --kind job needs none: leave it out, or use --kind trainjob")


def _check_training(training: Training, wishes: Wishes) -> RunSpec:
    """Resolve the settings as far as they are known without the task."""
    num_ranks = wishes.nodes * wishes.tasks_per_node
    flags: dict[str, Any] = dict(training.settings)
    nproc = flags.get("nproc")
    if num_ranks > 1:
        if nproc is not None and nproc != str(wishes.tasks_per_node):
            raise SpecInvalid(
                [
                    f"nproc is {nproc} but --tasks-per-node is {wishes.tasks_per_node}, and both are the ranks of each "
                    f"of {wishes.nodes} nodes: leave --nproc out"
                ]
            )
        flags["nproc"] = wishes.tasks_per_node
    if training.task is not None:
        flags["task"] = training.task
        if wishes.to != "kubernetes":
            _check_task_file(training.task)
    base = None
    if training.resume is not None and wishes.to != "kubernetes":
        run = RunDir.open(training.resume)
        base = run.read_spec()
        if training.task is None:  # otherwise the job would be refused only after waiting in the queue
            check_trusted(base.task, run, "train", is_trusted=is_true(flags.get("trust_task")))
    if base is None and training.task is None and training.resume is None:
        raise SpecInvalid(["no task is given: write it after the flags, as in `dure submit --to slurm file.py:Class`"])
    flags.setdefault("task", base.task if base is not None else "the.run:Task")
    resolved = resolve(
        flags={**flags, "task_options": dict(base.task_options) if base is not None else {}},
        environ={},
        config=training.config if wishes.to != "kubernetes" else None,
        task_defaults={},
        strategies=STRATEGIES,
        base=base,
        total_devices=num_ranks if wishes.nodes > 1 else None,
    )
    print_notes(resolved)
    spec = resolved.spec
    if spec.preflight:
        raise SpecInvalid(
            [
                f"preflight is for runs that dure starts itself, but {wishes.to} starts these ranks: leave it out, and "
                "call `dure preflight` there in a job of its own"
            ]
        )
    if num_ranks > 1 and STRATEGIES[spec.strategy].one_process:
        raise SpecInvalid(
            [f"strategy is {spec.strategy}, which is one process, but {num_ranks} are asked for: use ddp"]
        )
    return spec


def _check_task_file(task: str) -> None:
    where = task.rpartition(":")[0]
    if where.endswith(".py") and not Path(where).is_file():
        raise Misuse(f"{where} does not exist: give the task as file.py:Class, seen from here")


# --- the job


def _job(training: Training, wishes: Wishes, spec: RunSpec, now: datetime) -> Job:
    name = _name(training, wishes, spec, now)
    runs_dir = spec.runs_dir
    if wishes.claim is not None:
        runs_dir = runs_dir if "runs_dir" in training.settings else RUNS_IN_POD
        if not runs_dir.is_absolute():
            raise Misuse(f"--claim is mounted at --runs-dir, which is {runs_dir} but must begin with / in a pod")
    run = training.resume or runs_dir / name
    words = _train_arguments(training, name, runs_dir)
    again = ("--resume", str(run)) if training.resume else ("--resume", "auto")
    if wishes.to == "kubernetes" and training.resume is None:
        words = (*words, *again)  # a pod cannot know whether it is the first
    python = wishes.python or ("python" if wishes.to == "kubernetes" else sys.executable)
    _check_arguments({"the current folder": Path.cwd(), "--python": python, "the run's folder": run}, words)
    return Job(
        name=name,
        run=run,
        words=words,
        resume_words=words if training.resume else (*words, *again),
        nodes=wishes.nodes,
        tasks_per_node=wishes.tasks_per_node,
        cpus_per_task=_cores(wishes, spec),
        gpus_per_task=wishes.gpus_per_task,
        time_seconds=None if wishes.time is None else seconds_of(wishes.time),
        python=python,
        folder=Path.cwd(),
    )


def _check_arguments(paths: Mapping[str, object], words: Sequence[str]) -> None:
    """Refuse arguments that a script's line cannot hold: a line break in a path would begin another line.

    Raises:
        Misuse: There is such an argument; the message names it.
    """
    for what, path in paths.items():
        if one_line(path) != str(path):
            raise Misuse(
                f"{what} is {str(path)!a}, and no line of what is submitted can hold that: use a path without control "
                "characters"
            )
    for word in words:
        if "\0" in word or any("\ud800" <= letter <= "\udfff" for letter in word):
            raise Misuse(f"{word!a} is no text that a command can be given: write it in UTF-8")


def _cores(wishes: Wishes, spec: RunSpec) -> int | None:
    """Return the cores to request: as many as a task needs that starts its own ranks, since the default is one."""
    starts_ranks = wishes.nodes * wishes.tasks_per_node == 1 and spec.nproc > 1
    if wishes.cpus_per_task is None and starts_ranks and wishes.to != "kubernetes":
        return spec.nproc
    return wishes.cpus_per_task


def _name(training: Training, wishes: Wishes, spec: RunSpec, now: datetime) -> str:
    names = {name for name in (wishes.name, training.settings.get("name")) if name is not None}
    if len(names) > 1:
        raise Misuse(f"--name is {' and '.join(sorted(names))}: give it once")
    if names:
        (name,) = names
    elif training.resume is not None:
        name = training.resume.resolve().name
    elif wishes.to == "kubernetes":
        label = re.sub(r"[^a-z0-9]+", "-", spec.task.rpartition(":")[2].lower()).strip("-")[:20].strip("-")
        name = f"dure-{label or 'task'}-{now:%Y%m%d-%H%M%S}"
    else:
        name = default_name(spec.task, spec.strategy, now)
    check_name(name)
    return name


def _train_arguments(training: Training, name: str, runs_dir: Path) -> tuple[str, ...]:
    """Return the arguments of `dure train`; a resumed run already has its name and folder."""
    words: list[str] = [] if training.task is None else [training.task]
    place = {"name", "runs_dir"}
    for setting, value in training.settings.items():
        if isinstance(value, Mapping):
            words += [f"{flag_name(f'{setting}.{inner}')}={each}" for inner, each in value.items()]
        elif setting not in place:
            words.append(f"{flag_name(setting)}={value}")
    words += [f"--task.{option}={value}" for option, value in training.options.items()]
    if training.config is not None:
        words.append(f"--config={training.config}")
    if training.resume is not None:
        return *words, "--resume", str(training.resume)
    return *words, f"--name={name}", f"--runs-dir={runs_dir}"


def _kubernetes_options(wishes: Wishes) -> kubernetes.KubernetesOptions:
    assert wishes.image is not None
    given: Sequence[str] = [name for name in ("kind", "namespace", "runtime", "claim") if getattr(wishes, name)]
    return kubernetes.KubernetesOptions(image=wishes.image, **{name: getattr(wishes, name) for name in given})
