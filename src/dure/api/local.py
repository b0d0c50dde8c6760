"""Ranks of a run under our supervisor: their folder, their start and their result."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from dure.api.ranks import (
    Notes,
    Voices,
    failure_of,
    new_folder,
    records_missed,
    run_ranks,
    status_of,
    threads_for,
    write_trace_of_ranks,
)
from dure.errors import DureError, EnvironmentLacks, Interrupted, Misuse
from dure.failures.verdict import WorkerEnd, left_early
from dure.launch.hangs.watchdog import HangPolicy
from dure.launch.logs.rank_logs import Relay, Voice
from dure.launch.nodes.failover import LeaderFailover
from dure.launch.nodes.peers import Nodes
from dure.launch.rounds.outcome import Outcome
from dure.launch.rounds.request import Launch
from dure.launch.rounds.restart_policy import RestartPolicy
from dure.launch.rounds.signal_forwarding import signals_put_off
from dure.launch.worker.fork_safety import reason_fork_would_fail
from dure.process.context import Place
from dure.process.jobs import EvaluateJob, TrainJob
from dure.process.stop_signals import stop_exit_code
from dure.records import events
from dure.records.run_dir import SPEC, SUMMARY, RunDir
from dure.records.step_record import RunSummary
from dure.report.summary import summarise
from dure.spec import RunSpec
from dure.strategies.table import STRATEGIES
from dure.terminal import has_live_line, is_notebook, one_line
from dure.training.task.digests import class_digest
from dure.training.task.given_task import given_task, task_class

_WORKER = "dure.training.worker"
_REFUSED = (Misuse.exit_code, EnvironmentLacks.exit_code)


def run_folder(spec: RunSpec, resume: "Path | str | None") -> RunDir:
    """Open the folder of a resumed run, or create a new one."""
    if resume is not None:
        return RunDir.open(Path(resume))
    return new_folder(spec, spec.task, spec.strategy)


def count_processes(spec: RunSpec) -> int:
    """Return the number of processes of the run on all hosts."""
    info = STRATEGIES[spec.strategy]
    extra = (spec.options[info.extra_processes] or spec.num_devices) if info.extra_processes else 0
    return 1 if info.one_process else spec.num_devices + extra


def start_workers(
    notes: Notes,
    spec: RunSpec,
    job: TrainJob | EvaluateJob,
    *,
    until: ExitStack | None = None,
    failover: LeaderFailover | None = None,
) -> Outcome:
    """Start the run's ranks of this host, and return when those of all hosts have ended.

    Args:
        notes: Notes on the run, with its folder and its hosts.
        spec: Spec of the run.
        job: Job of the ranks.
        until: Stack that closes when the end is on record; signals that come too late for the ranks wait for it.
        failover: Failover of this host when it has lost the others; None if there is none.
    """
    run, nodes = notes.run, notes.nodes
    num_processes = nodes.me.num_ranks
    threads = threads_for(spec.threads, num_processes)
    start = _way_to_start(spec, num_processes, threads)
    if start == "inline":
        run.forget_failures()
        return _run_inline(job, Place(threads=threads, is_supervised=False))
    relay = Relay.of_stderr()
    console = 2 if relay is None else relay.writing

    def voice_of(rank: int) -> Voice:
        log = run.log_path(rank)
        if rank:
            return Voice(log=log)
        # stdout is for the results of a run, and ranks have none: with `--json` nothing else may be there
        is_live, is_erasable = has_live_line(), not is_notebook()
        return Voice(log=log, consoles=(console, console), has_live_line=is_live, can_erase=is_erasable)

    launch = Launch(
        entry=_WORKER,
        job=replace(job, task_code=class_digest(task_class(spec.task))),
        nodes=nodes,
        threads=threads,
        # on several nodes each would use its own clock; they have a separate store for every round
        store_prefix=f"{one_line(run.name)}/{time.time_ns()}" if nodes.is_alone else one_line(run.name),
        start=start,
        expendable=_expendable(spec),
        grace_seconds=spec.grace_seconds,
        saves_snapshots=notes.max_restarts > 0,
        restarts=RestartPolicy(most=notes.max_restarts, window_seconds=spec.restart_window_seconds),
        # an evaluation has no steps that would show the progress of its ranks
        hangs=HangPolicy(hang_after=spec.hang_after, action=spec.on_hang) if isinstance(job, TrainJob) else None,
        failover=failover,
    )
    return run_ranks(launch, notes, Voices(of=voice_of, relay=relay), until)


def notes_on(run: RunDir, spec: RunSpec, nodes: Nodes, *, max_restarts: int) -> Notes:
    """Return the notes on a run whose ranks are restarted at most `max_restarts` times."""
    return Notes(
        run=run,
        nodes=nodes,
        max_restarts=max_restarts,
        global_batch_size=spec.global_batch_size,
        is_quiet=spec.quiet,
        trackers=spec.trackers,
    )


def _way_to_start(spec: RunSpec, num_processes: int, threads: int) -> str:
    """Return how the ranks start; not by `spawn` if only this process and its forks have the task.

    Raises:
        EnvironmentLacks: Several ranks must be forked, and cannot be.
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


def _expendable(spec: RunSpec) -> range:
    """Return the ranks without which the others can continue: those with a device, if the strategy allows it."""
    info = STRATEGIES[spec.strategy]
    goes_on = info.outlives_ranks_without and not spec.options[info.outlives_ranks_without]
    return range(spec.num_devices if goes_on else 0)


def _run_inline(job: TrainJob | EvaluateJob, place: Place) -> Outcome:
    import torch

    from dure.training.worker import main

    threads = torch.get_num_threads()
    try:
        code = main(job, place)
    finally:
        torch.set_num_threads(threads)  # the process continues, and is not ours
    return Outcome(ends=[WorkerEnd(rank=0, exit_code=code, time=time.time(), was_stopped=False)])


@signals_put_off()
def finish(notes: Notes, spec: RunSpec, outcome: Outcome, *, is_own: bool = True) -> RunSummary:
    """Write the summary, whatever the result of the run, and raise an error unless it succeeded.

    A stop signal waits until it is written: the ranks have ended, and there is nothing else to stop.

    Args:
        notes: Notes on the run.
        spec: Spec of the run.
        outcome: End of the ranks.
        is_own: Whether this launcher writes the run's records; otherwise another node's does.
    """
    run = notes.run
    error = _error(notes, spec, outcome, is_own=is_own)
    summary = summarise(run, spec, status_of(error), None if error is None else str(error))
    is_refused = error is not None and error.exit_code in _REFUSED and (summary.steps == 0 or not _has_begun(run))
    if is_own and not is_refused:
        with nullcontext() if error is None else records_missed(error):  # the first cause is more than its record
            if error is not None:
                kind = events.Interrupted if isinstance(error, Interrupted) else events.Failed
                run.append_event(kind(message=str(error)))
            run.write_end(summary.to_json())
        if spec.trace is not None:
            write_trace_of_ranks(run)
    if error is not None:
        raise error
    return summary


def _error(notes: Notes, spec: RunSpec, outcome: Outcome, *, is_own: bool) -> DureError | None:
    """Return the error with which a run ended; None if it succeeded."""
    run = notes.run
    verdict, is_complete = outcome.judge(run.path, cure=run.how_to_go_on()), _ended_complete(run)
    if outcome.lost is not None and not is_own and is_complete:
        notes.print_status(outcome.lost)  # the run completed without this node
        return None
    again, goes_on_elsewhere = f"; `{run.resume_command}` goes on", not is_own and spec.fewest_nodes < spec.num_nodes
    after_lost = "" if goes_on_elsewhere else f"{again} from the last checkpoint"
    error = failure_of(outcome, verdict, after_lost=after_lost, after_hang=again)
    if error is not None or is_complete:
        return error
    if outcome.stopped_by is None:
        return failure_of(outcome, left_early(outcome.ends))
    words = _cut_off_text(run) if outcome.is_cut_off else _stopped_text(run)
    return Interrupted(words, stop_exit_code(outcome.stopped_by))


def _stopped_text(run: RunDir) -> str:
    again = f"`{run.resume_command}`"
    if run.has_checkpoints():
        return f"stopped; continue with {again}"
    return f"stopped before the first checkpoint; {again} starts from the beginning"


def _cut_off_text(run: RunDir) -> str:
    return (
        "stopped while the node that leads the run could not be reached: if the run goes on without this node, start "
        f"the same command once more to come back; otherwise `{run.resume_command}` goes on with it"
    )


def how_ended(run: RunDir) -> str | None:
    """Return a sentence on the end of the last attempt, by the record of its leader; None while it is running."""
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
    """Undo what a refused start wrote: remove a new run's folder, or restore a resumed run's records."""
    before = {} if is_new else {name: run.read_json(name) for name in (SPEC, SUMMARY) if (run.path / name).is_file()}
    try:
        yield
    except DureError as error:
        if error.exit_code in _REFUSED:
            if is_new:
                run.discard()
            elif not _has_begun(run):
                for name, record in before.items():
                    run.write_end(record) if name == SUMMARY else run.write_json(name, record)
        raise


def _has_begun(run: RunDir) -> bool:
    """Return whether the last attempt reached training."""
    return isinstance(_last_event(run, events.Attempt, events.Training), events.Training)
