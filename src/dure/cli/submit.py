"""`dure submit`: submission of a run to Slurm, Kubernetes or Ray."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from dure.cli.options.settings import (
    Shown,
    flag_parameters,
    option_parameters,
    setting_names,
    spell_out_truths,
    with_flags,
)
from dure.cli.options.task import take_task_options
from dure.cli.output import JsonFlag
from dure.errors import Misuse
from dure.spec import OTHER_NAMES
from dure.spec.old_names import SETTINGS as OLD_SETTINGS
from dure.spec.old_names import STRATEGIES_WITH
from dure.terminal import print_json, print_text

if TYPE_CHECKING:
    from dure.api.submit import Submission, Training

_TRUTHS = frozenset({"--dry-run", "--json", "--help", "-h", "--version"})
_VALUES = frozenset(
    {
        *("--to", "--name", "--nodes", "--tasks-per-node", "--cpus-per-task", "--gpus-per-task", "--python", "--time"),
        *("--partition", "--grace-seconds", "--sbatch"),
        *("--image", "--kind", "--namespace", "--runtime", "--claim", "--address"),
    }
)
_SLURM = Group.create_ordered("Slurm")
_KUBERNETES = Group.create_ordered("Kubernetes")
_RAY = Group.create_ordered("Ray")


def read(tokens: list[str]) -> tuple[list[str], Callable[..., None]]:
    """Return the tokens up to the task, and the verb with the rest, which are arguments of `dure train`."""
    own, rest = _split(tokens)
    return own, with_flags(partial(submit, rest), [], doc=submit.__doc__)


def _split(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split at the task, the first token that is neither a flag nor a flag's value, or at a `--`."""
    position = 1
    while position < len(tokens):
        word = tokens[position]
        if word == "--":
            return list(tokens[:position]), _checked(tokens[position + 1 :])
        if not word.startswith("-"):
            return list(tokens[:position]), _checked(tokens[position:])
        if (
            word.startswith("--")
            and (
                _setting(word) in (*setting_names(), *OTHER_NAMES, *STRATEGIES_WITH, *OLD_SETTINGS)
                or "." in _setting(word)
            )
            and word.partition("=")[0] not in _VALUES
        ):
            raise Misuse(f"{word} is a flag of the training: write it after the task")
        position += 1 if word in _TRUTHS or "=" in word else 2
    return list(tokens), []


def _setting(flag: str) -> str:
    return flag.partition("=")[0].removeprefix("--no-").removeprefix("--").replace("-", "_")


def _checked(rest: Sequence[str]) -> list[str]:
    for token in rest:
        flag = token.partition("=")[0]
        if flag in (_VALUES | {"--dry-run"}) - {"--name"}:
            raise Misuse(f"{flag} stands after the task, where the flags of the training are: write it before the task")
    return list(rest)


def submit(
    rest: list[str],
    *,
    to: Annotated[str, Parameter(help="slurm, kubernetes or ray")],
    dry_run: Annotated[
        bool, Parameter(name="--dry-run", negative=(), show_default=False, help="print what would be submitted")
    ] = False,
    name: Annotated[str | None, Parameter(help="of the job and its run (default: date, task and strategy)")] = None,
    nodes: Annotated[int, Parameter(help="machines")] = 1,
    tasks_per_node: Annotated[int, Parameter(help="ranks on each, one per device")] = 1,
    cpus_per_task: Annotated[
        int | None, Parameter(help="cores of each task (default: the cluster's, or --nproc's)", show_default=False)
    ] = None,
    gpus_per_task: Annotated[int, Parameter(help="GPUs of each rank")] = 0,
    python: Annotated[str | None, Parameter(help="interpreter that has dure there (default: this one)")] = None,
    time: Annotated[str | None, Parameter(help="longest time: minutes, H:MM:SS or D-HH:MM:SS")] = None,
    partition: Annotated[str | None, Parameter(group=_SLURM, help="where to queue")] = None,
    grace_seconds: Annotated[
        int | None, Parameter(group=_SLURM, help="before its end the job is told to checkpoint (default 120)")
    ] = None,
    sbatch: Annotated[
        tuple[str, ...],
        Parameter(
            group=_SLURM,
            negative=(),
            show_default=False,
            help="a further line as it would follow #SBATCH, as --sbatch=--account=me; repeatable",
        ),
    ] = (),
    image: Annotated[str | None, Parameter(group=_KUBERNETES, help="container image with dure and the task")] = None,
    kind: Annotated[
        str | None, Parameter(group=_KUBERNETES, help="trainjob (Kubeflow Trainer v2) or job (default trainjob)")
    ] = None,
    namespace: Annotated[str | None, Parameter(group=_KUBERNETES, help="where to apply it")] = None,
    runtime: Annotated[
        str | None, Parameter(group=_KUBERNETES, help="ClusterTrainingRuntime (default torch-distributed)")
    ] = None,
    claim: Annotated[
        str | None, Parameter(group=_KUBERNETES, help="PersistentVolumeClaim for the runs, mounted at --runs-dir")
    ] = None,
    address: Annotated[
        str | None, Parameter(group=_RAY, help="of a running cluster (default: one found, or a local one)")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Hand a run to Slurm, Kubernetes or Ray.

    dure submit --to slurm [flags of the job] file.py:Class [flags of dure train]; to resume a run, write `-- --resume
    runs/NAME` in place of the task.
    """
    from dure.api import submit as submission

    wishes = submission.Wishes(
        to=to,
        name=name,
        nodes=nodes,
        tasks_per_node=tasks_per_node,
        cpus_per_task=cpus_per_task,
        gpus_per_task=gpus_per_task,
        python=python,
        time=time,
        partition=partition,
        grace_seconds=grace_seconds,
        sbatch=sbatch,
        image=image,
        kind=kind,
        namespace=namespace,
        runtime=runtime,
        claim=claim,
        address=address,
    )
    prepared = submission.prepare(_read_training(rest), wishes)
    if dry_run:
        _show(prepared, as_json=json)
        return
    reply = prepared.send()
    if json:
        print_json({"to": to, "name": prepared.job.name, "run": str(prepared.job.run), "said": reply})
    else:
        print_text(_submitted_text(prepared, reply))


def _read_training(rest: list[str]) -> "Training":
    """Parse the flags after the task as `dure train` will, without loading the task."""
    from dure.api.submit import Training
    from dure.cli.app import build_app

    shown = Shown.wanted(rest, everything=False)
    strategies = option_parameters(rest, shown)
    tokens, options = take_task_options(["train", *spell_out_truths(rest, strategies)])
    found: dict[str, Any] = {}

    def collect(
        task: str | None = None, /, *, resume: Path | None = None, config: Path | None = None, **settings: Any
    ) -> None:
        given = {name: _text(value) for name, value in settings.items() if value is not None}
        found.update(task=task, resume=resume, config=config, settings=given)

    app = build_app(with_flags(collect, [*flag_parameters(setting_names(), shown), *strategies]), "train")
    app(tokens, exit_on_error=False, print_error=False)
    return Training(options=options, **found)


def _text(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _text(option) for name, option in value.items()}
    return str(value).lower() if isinstance(value, bool) else str(value)


def _show(prepared: "Submission", *, as_json: bool) -> None:
    plan = None if prepared.plan is None else prepared.plan.to_json()
    if as_json:
        shown = {"plan": plan} if plan is not None else {"text": prepared.text}
        print_json({"to": prepared.to, "name": prepared.job.name, "run": str(prepared.job.run), **shown})
    elif plan is not None:
        print_json(plan)
    else:
        print_text(prepared.text.removesuffix("\n"))


def _submitted_text(prepared: "Submission", reply: str) -> str:
    job = prepared.job
    if prepared.to == "slurm":
        return f"job {reply} of Slurm: run {job.run}, output in {job.name}-{reply}.out"
    if prepared.to == "kubernetes":
        return f"{reply}\nrun {job.run} in its pods"
    return f"run {job.run} {reply}"
