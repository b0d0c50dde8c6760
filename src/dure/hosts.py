"""A run of a task on several hosts: what may be asked for, what its launchers must agree on, what to look at before."""

from pathlib import Path
from typing import Any

from dure.errors import SpecInvalid
from dure.launch.rendezvous import NodeSettings, node_settings
from dure.machine import resolve_device
from dure.preflight.settings import PreflightSettings
from dure.rank import Launched
from dure.spec import NODE_FIELDS, ResolvedSpec, RunSpec
from dure.strategies import STRATEGIES

_MAY_DIFFER = (*NODE_FIELDS, "task", "threads", "runs_dir", "faults", "quiet", "start", "max_restarts", "hang_after")
"""Between hosts: what is of one host, or a path on it. The number of hosts is compared before."""


def several_hosts(resolved: ResolvedSpec, launched: Launched | None) -> NodeSettings | None:
    """Return what was said of several hosts, or None for a run on one.

    Args:
        resolved: The run's settings.
        launched: What a launcher that is not dure started this process as.

    Raises:
        SpecInvalid: All that cannot be so.
    """
    spec = resolved.spec
    several = node_settings(
        nnodes=spec.nnodes,
        node_rank=spec.node_rank,
        rendezvous=spec.rendezvous,
        secret_file=spec.secret_file,
        timeout_seconds=spec.rendezvous_timeout,
        allow_public_address=spec.allow_public_address,
    )
    if several is None:
        return None
    faults = _faults(resolved, launched)
    if faults:
        raise SpecInvalid(faults)
    return several


def _faults(resolved: ResolvedSpec, launched: Launched | None) -> list[str]:
    spec, faults = resolved.spec, []
    info = STRATEGIES[spec.strategy or "single"]
    if launched is not None:
        faults.append(f"nnodes is for runs that dure starts itself: leave it out, {launched.by} has its own")
    if info.one_process or info.extra_processes:
        why = "is one process" if info.one_process else "has servers, which are not spread over hosts yet"
        faults.append(
            f"strategy is {info.name}, which {why}, but nnodes is {spec.nnodes}: use --strategy ddp or fsdp, and an "
            "--nproc that counts the devices of all nodes"
        )
    elif spec.nproc % spec.nnodes:
        faults.append(
            f"nproc is {spec.nproc} and nnodes is {spec.nnodes}, but nproc counts the devices of all nodes, of which "
            f"each has as many: use --nproc {spec.nnodes * max(1, spec.nproc // spec.nnodes)}"
        )
    for name, value, cure in (("backend", "dure_shm", "gloo"), ("comm", "shm", "ring")):
        if getattr(spec, name) == value:
            faults.append(f"{name} is {value}, which is memory of one host, but nnodes is {spec.nnodes}: use {cure}")
    if spec.start == "inline":
        faults.append("start is inline but ranks on several nodes are processes: use fork or spawn")
    if spec.max_restarts and resolved.origin["max_restarts"].startswith("flag"):
        faults.append(
            "max_restarts is for runs on one host: leave it out; what ended on several goes on with --resume from its "
            "last checkpoint"
        )
    return faults


def facts_to_agree_on(spec: RunSpec, *, is_resumed: bool) -> dict[str, Any]:
    """Return what must be the same on all hosts, by its name in words."""
    settings = spec.model_dump(mode="json", exclude={*_MAY_DIFFER})
    where, _, name = spec.task.rpartition(":")
    label = f"{Path(where).name}:{name}" if where.endswith(".py") else spec.task
    return {"command": "dure train", "task": label, "is resumed": is_resumed, **settings}


def preflight_settings(
    spec: RunSpec, several: NodeSettings | None, launched: Launched | None, num_processes: int
) -> PreflightSettings:
    """Return what a preflight must know of a run.

    Args:
        spec: The run.
        several: What was said of several hosts.
        launched: What a launcher that is not dure started this process as.
        num_processes: On all hosts.

    Raises:
        SpecInvalid: The processes are started by another launcher, so that there are none yet to try it with.
    """
    if launched is not None:
        raise SpecInvalid(
            [
                f"preflight is for runs that dure starts itself, but {launched.by} started this process: call "
                "`dure preflight` before, in the same job"
            ]
        )
    return PreflightSettings(
        num_ranks=num_processes // spec.nnodes,
        num_devices=spec.nproc // spec.nnodes,
        device=resolve_device(spec.device),
        backend=spec.backend,
        threads=spec.threads,
        num_workers=spec.num_workers,
        runs_dir=spec.runs_dir,
        start="auto" if spec.start == "inline" else spec.start,
        share_devices=spec.share_devices,
        several=several,
        command="dure train --preflight",
        needs_shared_folder=True,
    )
