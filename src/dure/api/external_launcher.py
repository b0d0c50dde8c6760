"""Rank of a run whose processes a launcher started: torchrun, Slurm, Open MPI, or any other in `cluster/rank.py`."""

import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from dure.api.local import finish, notes_on, run_folder
from dure.api.multi_node import facts_to_agree_on
from dure.api.ranks import end_with_launcher, place_under
from dure.cluster.rank import Launched, RankInfo, meeting_point
from dure.errors import DureError, Interrupted, RunInvalid, SpecInvalid, WorkerFailed
from dure.failures.verdict import WorkerEnd
from dure.host.device_kinds import device_kind
from dure.host.devices import check_each_has_its_own, resolve_device
from dure.host.environment import variables
from dure.host.gpu_health import visible_gpus
from dure.launch.nodes.peers import Nodes
from dure.launch.rounds.outcome import Outcome
from dure.launch.worker.child import interface_variables
from dure.process.context import StoreAddress
from dure.process.jobs import TrainJob
from dure.records.run_dir import SPEC, RunDir
from dure.records.step_record import RunSummary
from dure.report.summary import summarise
from dure.spec import ResolvedSpec, RunSpec, flag_name, with_own_names
from dure.strategies.table import STRATEGIES
from dure.terminal import print_status
from dure.tracking.start import followed


def with_world_size(settings: dict[str, Any], launched: Launched) -> dict[str, Any]:
    """Set the number of processes, on this host and all hosts, to that of the launcher.

    Raises:
        SpecInvalid: The call sets another number.
    """
    by, rank = launched.by, launched.rank
    requested = with_own_names(settings).get("nproc")
    if requested is not None and str(requested).strip() != str(rank.local_world_size):
        of_all = "" if rank.is_one_host else f", {rank.world_size} on all hosts"
        processes = "1 process" if rank.local_world_size == 1 else f"{rank.local_world_size} processes"
        raise SpecInvalid(
            [f"nproc is {requested} but {by} started {processes} here{of_all}: leave --nproc out, {by} decides"]
        )
    return {**with_own_names(settings), "nproc": rank.local_world_size}


def total_devices(launched: Launched | None) -> int | None:
    """Return the number of ranks on all hosts; None if all are on this one, or dure starts them itself."""
    return None if launched is None or launched.rank.is_one_host else launched.rank.world_size


def without_extra_processes(resolved: ResolvedSpec, launched: Launched) -> ResolvedSpec:
    """Count as devices only the launcher's processes that have one; the last ones may be servers."""
    spec, by, world_size = resolved.spec, launched.by, launched.rank.world_size
    setting = STRATEGIES[spec.strategy].extra_processes
    if not setting or world_size == 1:
        return resolved
    extra = spec.options[setting]
    if (extra is None and world_size % 2) or (extra or 0) >= world_size:
        counted = "as many as there are others" if extra is None else str(extra)
        raise SpecInvalid(
            [
                f"{by} started {world_size} processes, of which {setting} is to be {counted}: start more, or "
                f"set {flag_name(f'{spec.strategy}.{setting}')}"
            ]
        )
    num_devices = world_size - (extra or world_size // 2)
    nproc = min(num_devices, launched.rank.local_world_size)  # of the first host, because servers are the last ranks
    changed = {"nproc": nproc, "total_devices": None if num_devices == nproc else num_devices}
    return replace(resolved, spec=spec.model_copy(update=changed), origin={**resolved.origin, "nproc": by})


def train_under_launcher(
    resolved: ResolvedSpec, resume: "Path | str | None", launched: Launched, *, is_auto: bool
) -> RunSummary:
    """Run as one rank of a run whose processes a launcher started."""
    from dure.training.worker import main

    spec, rank = resolved.spec, launched.rank
    end_with_launcher()
    if spec.on_divergence == "heal":
        raise SpecInvalid(
            [
                "on_divergence is heal, which starts all ranks again where they agreed, but "
                f"{launched.by} started these: choose stop, or start them with dure train --nproc"
            ]
        )
    if STRATEGIES[spec.strategy].one_process:
        raise SpecInvalid(
            [f"strategy is {spec.strategy} but {launched.by} started {rank.world_size} process(es): use --strategy ddp"]
        )
    run, store, interface = _meet(resolved, resume, launched)
    place = place_under(launched, store, spec.threads)
    asked = facts_to_agree_on(spec, is_resumed=resume is not None, is_auto=is_auto, is_launched=True)
    with (
        run.lock() if rank.rank == 0 else nullcontext(),
        followed(run, spec.trackers if rank.rank == 0 else ()),
        variables(rank.to_environment() | interface_variables(interface)),  # torchrun's, which user code reads
    ):
        return _judge_own_rank(run, spec, main(TrainJob(run=str(run.path), asked=asked), place), rank)


def _meet(
    resolved: ResolvedSpec, resume: "Path | str | None", launched: Launched
) -> tuple[RunDir, StoreAddress | None, str | None]:
    """Meet the other ranks; return the run's folder, which rank 0 chooses, the store, and the network interface."""

    def open_folder() -> dict[str, str]:
        try:
            run = run_folder(resolved.spec, resume)
            run.write_spec(resolved)
            run.forget_failures()
        except DureError as error:
            return {"error": str(error)}
        return {"run": str(run.path)}

    def begin_or_go_on() -> dict[str, str]:
        begun = meeting.recall("run")
        if begun is not None and (Path(begun) / SPEC).is_file():
            print_status(f"{launched.by} has started the ranks again: {begun} goes on")
            RunDir.open(Path(begun)).forget_failures()
            return {"run": begun}
        opened = open_folder()
        if "run" in opened:
            meeting.remember("run", str(Path(opened["run"]).resolve()))
        return opened

    rank, store, interface = launched.rank, None, None
    if rank.world_size == 1:
        opened = open_folder()
    else:
        from dure.comm.meeting import Meeting

        meeting = Meeting(rank, meeting_point(launched), timeout_seconds=resolved.spec.timeout_seconds)
        if not resolved.spec.share_devices:
            check_each_has_its_own(meeting.gather("devices", _own_gpu(resolved.spec, rank)))
        opened = meeting.send_to_all_ranks("run", begin_or_go_on if rank.rank == 0 else None)
        store, interface = meeting.address, meeting.interface
    if "error" in opened:
        raise RunInvalid(opened["error"])
    return RunDir.open(Path(opened["run"])), store, interface


def _own_gpu(spec: RunSpec, rank: RankInfo) -> str | None:
    """Return the UUID of this rank's GPU; None if it has none, or the driver does not report it."""
    if rank.rank >= spec.num_devices or not device_kind(resolve_device(spec.device)).has_nvml:
        return None
    names = visible_gpus()
    return names[rank.local_rank % len(names)] or None if names else None


def _judge_own_rank(run: RunDir, spec: RunSpec, exit_code: int, rank: RankInfo) -> RunSummary:
    """Raise the error of this rank; the launcher judges all ranks together."""
    outcome = Outcome(ends=[WorkerEnd(rank=rank.rank, exit_code=exit_code, time=time.time(), was_stopped=False)])
    if rank.rank == 0:
        nodes = Nodes.alone(rank.local_world_size)
        return finish(notes_on(run, spec, nodes, max_restarts=0), spec, outcome)
    verdict = outcome.judge(run.path, cure=run.how_to_go_on())
    if verdict is not None:
        raise WorkerFailed(verdict.text, verdict.exit_code)
    if outcome.stopped_by is not None:
        raise Interrupted(f"rank {rank.rank} was stopped", exit_code)
    return summarise(run, spec, "completed")
