"""Run of a task on one or several hosts: what they must agree on, its folder, its course."""

import platform
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dure.api.local import (
    count_processes,
    finish,
    how_ended,
    notes_on,
    nothing_half_written,
    run_folder,
    start_workers,
)
from dure.api.ranks import Notes, nodes_asked_for
from dure.cluster.rank import Launched
from dure.errors import RunInvalid, SpecInvalid
from dure.host.devices import resolve_device
from dure.launch.nodes.addresses import split_address
from dure.launch.nodes.failover import LeaderFailover
from dure.launch.nodes.leader_lease import Lease, live_leader
from dure.launch.nodes.peers import Nodes
from dure.launch.nodes.rendezvous import NodeSettings, about, join
from dure.launch.nodes.shared_folder import meet_in_folder
from dure.preflight.settings import PreflightSettings
from dure.process.jobs import TrainJob
from dure.records.run_dir import RunDir
from dure.records.step_record import RunSummary
from dure.spec import NODE_FIELDS, ResolvedSpec, RunSpec
from dure.strategies.table import STRATEGIES
from dure.tracking.start import followed
from dure.training.task.given_task import given_task

_MAY_DIFFER = (*NODE_FIELDS, "task", "threads", "runs_dir", "faults", "quiet", "start", "hang_after", "trust_task")
"""Fields that may differ between hosts: facts of one host, or paths on it. The number of hosts is compared earlier."""


def several_hosts(resolved: ResolvedSpec, launched: Launched | None) -> NodeSettings | None:
    """Return the settings for several hosts, or None for a run on one.

    Args:
        resolved: Settings of the run.
        launched: Description of this process by a launcher other than dure; None if there is none.

    Raises:
        SpecInvalid: Settings are invalid; the message lists all faults.
    """
    spec = resolved.spec
    several = nodes_asked_for(spec, spec.num_nodes, spec.fewest_nodes)
    if several is None:
        return None
    faults = _faults(resolved, launched)
    if faults:
        raise SpecInvalid(faults)
    return several


def _faults(resolved: ResolvedSpec, launched: Launched | None) -> list[str]:
    spec, faults = resolved.spec, []
    info = STRATEGIES[spec.strategy]
    if launched is not None:
        faults.append(f"nnodes is for runs that dure starts itself: leave it out, {launched.by} has its own")
    if info.one_process or info.extra_processes:
        why = "is one process" if info.one_process else "has servers, which are not spread over hosts yet"
        faults.append(f"strategy is {info.name}, which {why}, but nnodes is {spec.nnodes}: use --strategy ddp or fsdp")
    for name, value, cure in (("backend", "dure_shm", "gloo"), ("comm", "shm", "ring")):
        if getattr(spec, name) == value:
            faults.append(f"{name} is {value}, which is memory of one host, but nnodes is {spec.nnodes}: use {cure}")
    if spec.start == "inline":
        faults.append("start is inline but ranks on several nodes are processes: use fork or spawn")
    if spec.mesh is not None and spec.fewest_nodes < spec.num_nodes:
        faults.append(
            f"mesh is {spec.mesh}, a layout of {spec.num_devices} devices, but nnodes is {spec.nnodes}, so that there "
            f"may be fewer: leave one of them out, or use --nnodes {spec.num_nodes}"
        )
    return faults


def facts_to_agree_on(
    spec: RunSpec, *, is_resumed: bool, is_auto: bool = False, is_launched: bool = False
) -> dict[str, Any]:
    """Return what must be equal on all hosts, by its name in messages.

    With `--resume auto` the existence of the run is not included: a late node sees the run that the first one has
    begun. Under a launcher `nproc` is not included either, because it may start different numbers of ranks on the
    hosts.
    """
    settings = spec.by_name(exclude=(*_MAY_DIFFER, *(("nproc",) if is_launched else ())))
    where, _, name = spec.task.rpartition(":")
    label = f"{Path(where).name}:{name}" if where.endswith(".py") else spec.task
    given = given_task()
    return {
        "command": "dure train",
        "task": label,
        "is resumed": "auto" if is_auto else is_resumed,
        "attributes of the task": {} if given is None else dict(given.attributes),
        **settings,
    }


def preflight_settings(
    spec: RunSpec, several: NodeSettings | None, launched: Launched | None, num_processes: int
) -> PreflightSettings:
    """Return the settings of a preflight for a run.

    Args:
        spec: Spec of the run.
        several: Settings for several hosts; None for one.
        launched: Description of this process by a launcher other than dure; None if there is none.
        num_processes: Number of processes on all hosts.

    Raises:
        SpecInvalid: Another launcher starts the processes, so that there are none yet for a preflight.
    """
    if launched is not None:
        raise SpecInvalid(
            [
                f"preflight is for runs that dure starts itself, but {launched.by} started this process: call "
                "`dure preflight` before, in the same job"
            ]
        )
    return PreflightSettings(
        num_ranks=num_processes // spec.num_nodes,
        num_devices=spec.nproc,
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


def train_on_hosts(
    resolved: ResolvedSpec, resume: "Path | str | None", several: NodeSettings | None, *, is_auto: bool
) -> RunSummary:
    """Train with the ranks of this host, together with those of other hosts if there are several.

    Raises:
        RunInvalid: A node does not see the run's folder, where each rank writes its share of a checkpoint.
    """
    spec = resolved.spec
    facts = facts_to_agree_on(spec, is_resumed=resume is not None, is_auto=is_auto)
    several = several and _led_from(several, spec, resume)
    with join(several, facts, count_processes(spec) if several is None else spec.nproc) as nodes, ExitStack() as held:
        run = _folder(nodes, resolved, resume, held)
        notes = notes_on(run, spec, nodes, max_restarts=spec.max_restarts)
        if not nodes.is_leader:
            notes.print_status(
                f"node {nodes.me.node_rank} takes part in {run.path.name}; node {nodes.leader} shows how it goes"
            )
        failover = None
        if several is not None and nodes.is_elastic:
            failover = _failover(notes, several, facts, held)
        if nodes.folder is None:
            nodes.gather(None)  # node 0 has written the spec, which the ranks read
        if nodes.is_leader:
            held.enter_context(followed(run, spec.trackers, is_elastic=nodes.is_elastic))
        outcome = start_workers(notes, spec, TrainJob(run=str(run.path)), until=held, failover=failover)
        is_own = nodes.is_leader and (nodes.lease is None or not nodes.lease.is_taken())
        if nodes.lease is not None and is_own:
            held.callback(nodes.lease.give_up)
        return finish(notes, spec, outcome, is_own=is_own)


def _folder(nodes: Nodes, resolved: ResolvedSpec, resume: "Path | str | None", held: ExitStack) -> RunDir:
    """Meet in the run's folder; the first leader creates and locks it."""

    def refuse(name: str) -> RunDir:
        raise RunInvalid(
            f"node {nodes.me.node_rank} ({platform.node()}) does not see the run's folder {name}, which node 0 made: "
            "put --runs-dir on a file system that all nodes share, under the same path, for every rank writes its "
            "share of the checkpoints there"
        )

    if nodes.folder is not None:
        path = Path(nodes.folder)
        return RunDir(path) if Lease(path).read() is not None else refuse(path.name)
    met = meet_in_folder(nodes, lambda: run_folder(resolved.spec, resume), refuse, is_new=resume is None)
    if met.is_own:
        held.enter_context(met.run.lock())
        held.enter_context(nothing_half_written(met.run, is_new=resume is None))
        met.run.write_spec(resolved)
    return met.run


def _failover(notes: Notes, several: NodeSettings, facts: dict[str, Any], held: ExitStack) -> LeaderFailover:
    """Publish the leader in the run's folder, and prepare a failover for when it cannot be reached."""
    run, nodes = notes.run, notes.nodes
    port, folder = split_address(several.rendezvous)[1], str(run.path.resolve())
    lease = Lease(run.path)
    if nodes.is_leader:
        lease.claim(nodes.me.node_rank, nodes.me.address, port)
    if nodes.folder is None:
        nodes.gather(None)  # the leader has begun its term
    lease.look()
    nodes.lease = lease

    def lead() -> None:
        with suppress(RunInvalid):  # a frozen leader may still hold the lock, but writes nothing any more
            held.enter_context(run.lock())
        held.enter_context(followed(run, notes.trackers, is_elastic=True))

    return LeaderFailover(
        join=about(several, nodes.me, facts),
        folder=folder,
        secret_file=several.secret_file,
        port=port,
        timeout_seconds=several.timeout_seconds,
        how_ended=lambda: how_ended(run),
        on_wait=notes.print_status,
        on_lead=lead,
    )


def _led_from(several: NodeSettings, spec: RunSpec, resume: "Path | str | None") -> NodeSettings:
    """Find out whether the run is already running, and who leads it, because this node may be coming back."""
    if several.fewest == several.num_nodes or (resume is None and spec.name is None):
        return several
    path = Path(resume) if resume is not None else spec.runs_dir / str(spec.name)
    leader = live_leader(path)
    if leader is None or leader.node_rank == several.node_rank:
        return several
    return replace(several, leader=(leader.address, leader.port))
