"""A run's ranks under our supervisor: its folder, how they are started, and what came of them."""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from dure.errors import FAILED, DureError, EnvironmentLacks, Interrupted, Misuse, WorkerFailed
from dure.failures.verdict import Verdict, WorkerEnd, judge, left_early, stop_signal
from dure.host.devices import count_cores, crowding
from dure.launch.hangs.diagnosis import tell_of_hang
from dure.launch.hangs.watchdog import HangPolicy
from dure.launch.logs.rank_logs import RankLogs, Relay, Voice
from dure.launch.nodes.failover import WayBack
from dure.launch.nodes.peers import Nodes
from dure.launch.rounds.request import Launch
from dure.launch.rounds.restart_policy import Restart, RestartPolicy
from dure.launch.rounds.signal_forwarding import signals_put_off
from dure.launch.rounds.supervisor import Outcome, run_workers
from dure.launch.worker.child import Output
from dure.launch.worker.fork_safety import reason_fork_would_fail
from dure.process.context import Place
from dure.process.stop_signals import stop_exit_code
from dure.records import events
from dure.records.run_dir import SPEC, SUMMARY, RunDir, default_name
from dure.records.step_record import RunSummary
from dure.report.summary import summarise
from dure.spec import RunSpec
from dure.strategies.table import STRATEGIES
from dure.terminal import has_live_line, is_notebook, tell
from dure.training.task.digests import class_digest
from dure.training.task.given_task import given_task, task_class

_WORKER = "dure.training.worker"
_REFUSED = (Misuse.exit_code, EnvironmentLacks.exit_code)


def run_folder(spec: RunSpec, resume: "Path | str | None") -> RunDir:
    """Open the folder of a run that goes on, or make one."""
    if resume is not None:
        return RunDir.open(Path(resume))
    name = spec.name or default_name(spec.task, spec.strategy, datetime.now())
    return RunDir.create(spec.runs_dir, name, or_numbered=spec.name is None, is_shared=spec.share_run)


def count_processes(spec: RunSpec) -> int:
    """Return how many processes the run has on all hosts."""
    info = STRATEGIES[spec.strategy]
    extra = (getattr(spec, info.extra_processes) or spec.num_devices) if info.extra_processes else 0
    return 1 if info.one_process else spec.num_devices + extra


def threads_for(spec: RunSpec, num_processes: int) -> int:
    """Return how many threads each process has."""
    return spec.threads or max(1, count_cores() // num_processes)


def start_workers(
    run: RunDir, spec: RunSpec, job: Mapping[str, Any], nodes: Nodes | None = None, way_back: WayBack | None = None
) -> Outcome:
    """Start the run's ranks of this host, and return when those of all hosts have ended.

    Args:
        run: Its folder.
        spec: What is run.
        job: What the ranks are to do.
        nodes: All hosts, if there are several.
        way_back: What this one does when it has lost the others.
    """
    num_processes = count_processes(spec) if nodes is None else nodes.me.num_ranks
    ranks = range(num_processes) if nodes is None else range(nodes.first_rank, nodes.first_rank + num_processes)
    run.forget_failures()
    threads = threads_for(spec, num_processes)
    start = _way_to_start(spec, num_processes, threads)
    if crowded := crowding(num_processes):
        say(crowded, spec)
    if start == "inline":
        return _run_inline(job, Place(threads=threads, is_supervised=False))

    def writes() -> bool:
        return nodes is None or nodes.is_leader

    relay = Relay.of_stderr()
    console = 2 if relay is None else relay.writing

    def voice_of(rank: int) -> Voice:
        log = run.log_path(rank)
        if rank:
            return Voice(log=log)
        # the results of a run are on stdout, and ranks have none: `--json` must find nothing else there
        is_live, is_erasable = has_live_line(), not is_notebook()
        return Voice(log=log, consoles=(console, console), has_live_line=is_live, can_erase=is_erasable)

    with closing(RankLogs(voice_of, ranks, relay)) as logs:

        def output_of(rank: int) -> Output:
            return Output(descriptors=logs.descriptors_of(rank), has_live_line=voice_of(rank).has_live_line)

        return run_workers(
            Launch(
                entry=_WORKER,
                job={**job, "task_code": class_digest(task_class(spec.task))},
                num_processes=num_processes,
                threads=threads,
                outputs=[output_of(rank) for rank in ranks],
                output_of=output_of,
                logs=logs,
                # of several nodes each asks its own clock; they have a store of their own for every round
                store_prefix=f"{run.name}/{time.time_ns()}" if nodes is None else run.name,
                start=start,
                expendable=_expendable(spec),
                grace_seconds=spec.grace_seconds,
                saves_snapshots=_restart_policy(spec, job).most > 0,
                on_stopping=lambda text: say(text, spec),
                restarts=_restart_policy(spec, job),
                on_restart=lambda restart: _note_restart(run, restart, spec, writes=writes()),
                on_change=None if nodes is None else lambda why: _note_change(run, why, nodes, spec),
                # an evaluation has no steps by which its ranks could be seen to get on
                hangs=HangPolicy(hang_after=spec.hang_after, action=spec.on_hang) if job["kind"] == "train" else None,
                on_hang=lambda hang: tell_of_hang(run if writes() else None, hang),
                nodes=nodes,
                way_back=way_back,
            )
        )


def _way_to_start(spec: RunSpec, num_processes: int, threads: int) -> str:
    """Return how the ranks start: where only this process and its forks have the task, not by `spawn`.

    Raises:
        EnvironmentLacks: Several ranks would have to be forked, and cannot be.
    """
    given = given_task()
    if spec.start != "auto" or given is None or not given.is_only_here:
        return spec.start
    reason = reason_fork_would_fail(threads)
    if reason is None:
        return "fork"
    if num_processes == 1:
        return "inline"
    raise EnvironmentLacks(
        f"the ranks have to be forked from this process, because {given.why}, but {reason}: start the run before that, "
        "in a fresh process or kernel, or put the task's class into a file"
    )


def _restart_policy(spec: RunSpec, job: Mapping[str, Any]) -> RestartPolicy:
    """Return how often ranks are started again; an evaluation is simply asked for once more."""
    most = spec.max_restarts if job["kind"] == "train" else 0
    return RestartPolicy(most=most, window_seconds=spec.restart_window_seconds)


def _note_restart(run: RunDir, restart: Restart, spec: RunSpec, *, writes: bool) -> None:
    rank, step, message = restart.rank, restart.step, restart.cause
    event: events.Event
    if restart.microbatch_sizes is None:
        event = events.Restarted(number=restart.number, rank=rank, step=step, message=message)
        where = "" if restart.go_back_to is None else ", from where all agreed"
        said = f"restart {restart.number} of {spec.max_restarts}{where}"
    else:
        before, after = restart.microbatch_sizes
        event = events.MicrobatchHalved(before=before, after=after, rank=rank, step=step, message=message)
        said = (
            f"step {restart.step} is repeated with {after} instead of {before} samples at once on each device; "
            f"the global batch stays {spec.global_batch_size}"
        )
    if writes:
        run.append_event(event)
        run.forget_failures()
    say(f"{restart.cause}\n      {said}", spec)


def _note_change(run: RunDir, why: str, nodes: Nodes, spec: RunSpec) -> None:
    """Say that the run goes on with other nodes, and write it down on the one that leads."""
    there = tuple(sorted(member.node_rank for member in nodes.members))
    if nodes.is_leader:
        run.append_event(
            events.NodesChanged(message=why, nodes=there, world_size=nodes.world_size, leader=nodes.leader)
        )
        run.forget_failures()
    on = f"node {there[0]}" if len(there) == 1 else f"nodes {', '.join(map(str, there))}"
    say(f"{why}\n      the run goes on with {on}: {nodes.world_size} rank{'s' * (nodes.world_size > 1)}", spec)


def say(text: str, spec: RunSpec) -> None:
    """Tell people of what happens to the run, unless they asked for quiet."""
    if not spec.quiet:
        tell(text)


def _expendable(spec: RunSpec) -> range:
    """Return the ranks that the others go on without: those with a device, where the strategy says so."""
    info = STRATEGIES[spec.strategy]
    goes_on = info.outlives_ranks_without and not getattr(spec, info.outlives_ranks_without)
    return range(spec.num_devices if goes_on else 0)


def _run_inline(job: Mapping[str, Any], place: Place) -> Outcome:
    import torch

    from dure.training.worker import main

    threads = torch.get_num_threads()
    try:
        code = main(job, place)
    finally:
        torch.set_num_threads(threads)  # the process lives on, and is not ours
    return Outcome(ends=[WorkerEnd(rank=0, exit_code=code, time=time.time(), was_stopped=False)], signal=None)


def signal_of(outcome: Outcome) -> int | None:
    """Return the signal that stopped the run, sent to the supervisor or to a rank."""
    return outcome.signal if outcome.signal is not None else stop_signal(outcome.ends)


@signals_put_off()
def finish(run: RunDir, spec: RunSpec, outcome: Outcome, *, is_own: bool = True) -> RunSummary:
    """Write the summary, whatever came of the run, and raise what is not success.

    A stop signal waits until it is written: the ranks have ended, and there is nothing else to stop.

    Args:
        run: Its folder.
        spec: What was run.
        outcome: How the ranks ended.
        is_own: Whether this launcher writes the run's records; otherwise another node's does.
    """
    stopped_by = signal_of(outcome)
    verdict = judge(run.path, outcome.ends, stopped_by, cure=run.how_to_go_on())
    error: DureError | None = None
    status = "completed"
    if verdict is None and not _ended_complete(run):
        if stopped_by is not None:
            status = "interrupted"
            words = _cut_off_words(run) if outcome.is_cut_off else _stopped_words(run)
            error = Interrupted(words, stop_exit_code(stopped_by))
        else:
            verdict = left_early(outcome.ends)
    if outcome.lost is not None and not is_own and _ended_complete(run):
        say(outcome.lost, spec)  # it was done without this node
        verdict = None
    elif outcome.lost is not None:
        goes_on_elsewhere = not is_own and spec.fewest_nodes < spec.num_nodes
        cure = "" if goes_on_elsewhere else f"; `{run.resume_command}` goes on from the last checkpoint"
        text = f"{outcome.lost}{cure}"
        verdict = Verdict(text=text, exit_code=FAILED, first=None)
    elif outcome.hang is not None:
        text = f"the ranks were ended because they hung (--on-hang); `{run.resume_command}` goes on"
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
    kind = events.Interrupted if isinstance(error, Interrupted) else events.Failed
    run.append_event(kind(message=str(error)))
    run.write_json(SUMMARY, summary.to_json())
    raise error


def _stopped_words(run: RunDir) -> str:
    again = f"`{run.resume_command}`"
    if run.has_checkpoints():
        return f"stopped; continue with {again}"
    return f"stopped before the first checkpoint; {again} starts from the beginning"


def _cut_off_words(run: RunDir) -> str:
    return (
        "stopped while the node that leads the run could not be reached: if the run goes on without this node, start "
        f"the same command once more to come back; otherwise `{run.resume_command}` goes on with it"
    )


def how_ended(run: RunDir) -> str | None:
    """Return how the last attempt ended, by the record of the node that led it; None while it goes on."""
    match _last_event(run, events.Attempt, events.Completed, events.Interrupted, events.Failed):
        case events.Completed():
            return "the run was completed"
        case events.Interrupted():
            return f"the run was stopped: `{run.resume_command}` goes on with it"
        case events.Failed():
            return f"the run failed: `{run.resume_command}` goes on from its last checkpoint"
    return None


def _ended_complete(run: RunDir) -> bool:
    last = _last_event(run, events.Attempt, events.Completed, events.Interrupted)
    return isinstance(last, events.Completed)


def _last_event(run: RunDir, *kinds: type[events.Event]) -> events.Event | None:
    last = None
    for event in run.events():
        if isinstance(event, kinds):
            last = event
    return last


@contextmanager
def nothing_half_written(run: RunDir, *, is_new: bool) -> Iterator[None]:
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
    """Return whether the last attempt got as far as training."""
    return isinstance(_last_event(run, events.Attempt, events.Training), events.Training)
