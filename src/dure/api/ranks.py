"""Ranks of a task or a script under our supervisor: their folder, their start, and the errors from their ends."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Protocol

from dure.cluster.rank import Launched
from dure.errors import FAILED, DiskFull, DureError, Interrupted, WorkerFailed
from dure.failures.verdict import Verdict
from dure.host.devices import count_cores, crowding
from dure.launch.hangs.diagnosis import HangVerdict, print_and_save_hang
from dure.launch.logs.rank_logs import RankLogs, Relay, Voice
from dure.launch.nodes.peers import Nodes
from dure.launch.nodes.rendezvous import NodeSettings, node_settings
from dure.launch.rounds.outcome import Outcome
from dure.launch.rounds.request import Launch
from dure.launch.rounds.start_rank import cannot_start
from dure.launch.rounds.supervisor import run_workers
from dure.launch.worker.child import Output
from dure.process.context import Place, StoreAddress
from dure.process.parent_death import die_with_parent
from dure.process.round_orders import Restart
from dure.records import events
from dure.records.rank_profiles import TRACE
from dure.records.run_dir import RunDir, default_name
from dure.terminal import one_line, print_status


class RunSettings(Protocol):
    """Settings common to runs of tasks and of scripts."""

    @property
    def runs_dir(self) -> Path: ...
    @property
    def name(self) -> str | None: ...
    @property
    def share_run(self) -> bool: ...
    @property
    def node_rank(self) -> int | None: ...
    @property
    def rendezvous(self) -> str | None: ...
    @property
    def secret_file(self) -> Path | None: ...
    @property
    def rendezvous_timeout(self) -> float: ...
    @property
    def allow_public_address(self) -> bool: ...


def nodes_asked_for(settings: RunSettings, nnodes: int, fewest: int | None = None) -> NodeSettings | None:
    """Return the settings for several nodes, or None for a run on one.

    Raises:
        SpecInvalid: Settings are invalid; the message lists all faults.
    """
    return node_settings(
        nnodes=nnodes,
        fewest=fewest,
        node_rank=settings.node_rank,
        rendezvous=settings.rendezvous,
        secret_file=settings.secret_file,
        timeout_seconds=settings.rendezvous_timeout,
        allow_public_address=settings.allow_public_address,
    )


def new_folder(settings: RunSettings, subject: str, manner: str, *, for_script: bool = False) -> RunDir:
    """Create the folder of a run, named after its subject and manner unless the settings name it."""
    return RunDir.create(
        settings.runs_dir,
        settings.name or default_name(subject, manner, datetime.now()),
        or_numbered=settings.name is None,
        for_script=for_script,
        is_shared=settings.share_run,
    )


def threads_for(threads: int | None, num_processes: int) -> int:
    """Return the number of threads of each process of this host."""
    return threads or max(1, count_cores() // num_processes)


def end_with_launcher() -> None:
    """End together with torchrun's agent, which would otherwise leave its ranks running when it is killed."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(os.getppid())


def place_under(launched: Launched, store: StoreAddress | None, threads: int | None, *, round_number: int = 0) -> Place:
    """Return the context of a rank that a launcher started, with a number of threads or its share of the cores."""
    rank = launched.rank
    threads = threads_for(threads or launched.cores, rank.local_world_size)
    return Place(rank=rank, store=store, threads=threads, is_supervised=False, round=round_number)


@contextmanager
def records_missed(cause: DureError | None = None) -> Iterator[None]:
    """Print an error in writing records instead of raising it: the folder was removed, or the disk is full.

    Args:
        cause: Error with which the run ends. A full disk that it names already is not printed again.
    """
    try:
        yield
    except DureError as error:
        if not (isinstance(error, DiskFull) and cause is not None and DiskFull.CURE in str(cause)):
            print_status(str(error))


@dataclass(frozen=True, kw_only=True)
class Notes:
    """Notes on a run while its ranks run: in the terminal, and in its folder if this node leads."""

    run: RunDir
    nodes: Nodes
    max_restarts: int
    global_batch_size: int | None = None
    is_quiet: bool = False
    trackers: tuple[str, ...] = ()
    """Names of the experiment trackers to which the run is handed over."""
    needs_records: bool = True
    """False if the run goes on without its records: a script has its own, and its end is what its user must see."""

    def print_status(self, text: str) -> None:
        """Print a message on the run, unless the user asked for quiet."""
        if not self.is_quiet:
            print_status(text)

    def hang(self, verdict: HangVerdict) -> None:
        """Record a hang with all its evidence."""
        print_and_save_hang(self.run if self.nodes.is_leader else None, verdict)

    def restart(self, restart: Restart) -> None:
        """Record and print why the ranks restart, and how."""
        rank, step, message = restart.rank, restart.step, restart.cause
        if restart.microbatch_sizes is None:
            where = "" if restart.go_back_to is None else ", from where all agreed"
            consequence = f"restart {restart.number} of {self.max_restarts}{where}"
            self._write(events.Restarted(number=restart.number, rank=rank, step=step, message=message))
        else:
            before, after = restart.microbatch_sizes
            consequence = (
                f"step {restart.step} is repeated with {after} instead of {before} samples at once on each device; "
                f"the global batch stays {self.global_batch_size}"
            )
            self._write(events.MicrobatchHalved(before=before, after=after, rank=rank, step=step, message=message))
        self.print_status(f"{restart.cause}\n      {consequence}")

    def change(self, why: str) -> None:
        """Record and print that the run continues with other nodes."""
        nodes = self.nodes
        there = tuple(sorted(member.node_rank for member in nodes.members))
        self._write(events.NodesChanged(message=why, nodes=there, world_size=nodes.world_size, leader=nodes.leader))
        on = f"node {there[0]}" if len(there) == 1 else f"nodes {', '.join(map(str, there))}"
        ranks = f"{nodes.world_size} rank{'s' * (nodes.world_size > 1)}"
        self.print_status(f"{why}\n      the run goes on with {on}: {ranks}")

    def _write(self, event: events.Event) -> None:
        """Record why there is another round, to which failures of the previous one are irrelevant."""
        if self.nodes.is_leader:
            with nullcontext() if self.needs_records else records_missed():
                self.run.append_event(event)
                self.run.forget_failures()


@dataclass(frozen=True, kw_only=True)
class Voices:
    """Destinations of the output of ranks."""

    of: Callable[[int], Voice]
    """Function that returns the destination of a rank's output."""
    relay: Relay | None = None
    """Console of the voices that use its descriptor; None if there is none."""
    is_read_at_once: bool = False
    """True if the process that shows the output is started before there is any."""


@contextmanager
def _limits_as_sentences() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.EAGAIN):
            raise
        raise cannot_start("the ranks", error) from error


@_limits_as_sentences()
def run_ranks(launch: Launch, notes: Notes, voices: Voices | None, until: ExitStack | None = None) -> Outcome:
    """Start a run's ranks of this host, and return when those of all hosts have ended.

    Args:
        launch: Description of the start.
        notes: Notes on the run.
        voices: Destinations of the output; None for a single rank that keeps the terminal.
        until: Stack that closes when the end is on record; signals that come too late for the ranks wait for it.

    Raises:
        EnvironmentLacks: A limit on open files or processes is reached.
    """
    notes.run.forget_failures()
    if crowded := crowding(launch.nodes.me.num_ranks):
        notes.print_status(crowded)
    if voices is None:
        return run_workers(replace(launch, output_of=lambda rank: Output(is_terminal=True), listener=notes), until)
    with closing(RankLogs(voices.of, launch.nodes.own_ranks, voices.relay)) as logs:
        if voices.is_read_at_once:
            logs.start()

        def output_of(rank: int) -> Output:
            return Output(descriptors=logs.descriptors_of(rank), has_live_line=voices.of(rank).has_live_line)

        return run_workers(replace(launch, output_of=output_of, logs=logs, listener=notes), until)


def failure_of(
    outcome: Outcome, verdict: Verdict | None, *, after_lost: str = "", after_hang: str = ""
) -> WorkerFailed | None:
    """Return the error with which a run ends because of its ranks or nodes; None if none of them failed.

    Args:
        outcome: End of all ranks.
        verdict: Verdict on failed ranks.
        after_lost: Advice if a node is lost.
        after_hang: Advice if ranks were ended because they hung.
    """
    if outcome.lost is not None:
        text, exit_code = f"{outcome.lost}{after_lost}", FAILED
    elif outcome.hang is not None:
        text, exit_code = f"the ranks were ended because they hung (--on-hang){after_hang}", FAILED
    elif verdict is not None:
        text, exit_code = verdict.text, verdict.exit_code
    else:
        return None
    return WorkerFailed(text if outcome.refusal is None else f"{text}\n{outcome.refusal}", exit_code)


def write_trace_of_ranks(run: RunDir) -> None:
    """Write the profiles of all ranks as one trace, if there are any; an error is a sentence, as the run has ended."""
    from dure.report.profiles import has_profiles, merge_profiles

    with records_missed():
        if not has_profiles(run):
            return
        merged = merge_profiles(run)
        print_status(
            f"trace of {merged.num_steps} step{'s' * (merged.num_steps != 1)} of {len(merged.ranks)} "
            f"rank{'s' * (len(merged.ranks) != 1)}: {one_line(run.path / TRACE)}; open it in ui.perfetto.dev"
        )


def status_of(error: DureError | None) -> str:
    """Return the status of a run that ended with an error or None, as in its summary."""
    if error is None:
        return "completed"
    return "interrupted" if isinstance(error, Interrupted) else "failed"
