"""Run of a user's script on many ranks: `dure run`."""

import importlib.util
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from dure.api.ranks import (
    Notes,
    Voices,
    end_with_launcher,
    failure_of,
    new_folder,
    nodes_asked_for,
    place_under,
    records_missed,
    run_ranks,
    status_of,
    threads_for,
    write_trace_of_ranks,
)
from dure.cluster.rank import Launched, meeting_point, read_launcher
from dure.errors import DureError, Interrupted, SpecInvalid
from dure.failures.record import failure_file, failure_to_json
from dure.failures.verdict import how_stopped
from dure.host.backends import OVER_SOCKETS, device_backend
from dure.host.devices import count_all_accelerators, count_cores, resolve_device
from dure.launch.hangs.watchdog import HangPolicy
from dure.launch.logs.rank_logs import Voice
from dure.launch.nodes.peers import Nodes
from dure.launch.nodes.rendezvous import DEFAULT_TIMEOUT_SECONDS, NodeSettings, join
from dure.launch.nodes.shared_folder import meet_in_folder
from dure.launch.rounds.outcome import Outcome
from dure.launch.rounds.request import Launch
from dure.launch.rounds.restart_policy import RestartPolicy
from dure.launch.worker.child import interface_variables, leave
from dure.preflight.settings import PreflightSettings
from dure.process.jobs import ScriptJob
from dure.process.stop_signals import stop_exit_code
from dure.records.run_dir import RunDir
from dure.records.step_record import ScriptSummary
from dure.spec.fields import MOST_PROCESSES, MOST_THREADS
from dure.terminal import shell_word

_ENTRY = "dure.launch.scripts.script_worker"
"""Module that each rank starts with."""


@dataclass(frozen=True, kw_only=True)
class ScriptSettings:
    """Settings of `dure run`."""

    script: str
    """Path of a file, or name of a module."""
    arguments: Sequence[str] = ()
    is_module: bool = False
    nproc: str = "auto"
    """Ranks per node, as in torchrun: a number, `cpu`, `gpu`, or `auto` for the number of accelerators (at least 1)."""
    start: str = "auto"
    max_restarts: int = 0
    on_hang: str = "wait"
    """Action on a hang. `wait` only reports it, because a script may have good reasons to make some ranks wait."""
    hang_after: float | None = None
    grace_seconds: float = 30.0
    threads: int | None = None
    local_rank_argument: str = "auto"
    """Form of the local rank's argument: `auto`, `none`, `dash` (`--local-rank`), `underscore` (`--local_rank`), or
    `apex` (`--world-size` and `--rank` after the script's own arguments).
    """
    with_prefix: bool = True
    nnodes: int = 1
    node_rank: int | None = None
    rendezvous: str | None = None
    secret_file: Path | None = None
    rendezvous_timeout: float = DEFAULT_TIMEOUT_SECONDS
    allow_public_address: bool = False
    runs_dir: Path = Path("runs")
    name: str | None = None
    share_run: bool = False
    """True if others may read the run's folder."""
    shown_ranks: str | None = None
    """Local ranks whose output is shown, such as `0,1`; None for all."""
    role: str = "default"
    record: bool = False
    """True to record every step of every rank, as for a task."""
    observer: tuple[str, str] | None = None
    """Module that each rank lets observe the script, and what it is given; None for none."""
    is_silent: bool = False
    """True to show nothing of the script's output; the run's logs have it."""
    trace: int | None = None
    """Steps of all ranks to write as a trace, which are recorded too; None for none."""
    preflight: bool = False
    """True to check machines and network first, and to start the run only if all is well."""
    face: str | None = None
    """Library whose interface the script finds in dure, such as `horovod`; None for none."""


def run_script(settings: ScriptSettings) -> Path:
    """Run a script on every rank, wait for all, leave none behind, and return the run folder.

    If a launcher started the ranks, this process is one of them. It ends with the script's exit code, and the launcher
    supervises all ranks.

    Raises:
        Misuse: There is no such script, or a setting is invalid.
        EnvironmentLacks: The system starts no more processes, or a launcher's variables are invalid.
        WorkerFailed: A rank failed; the message names the first cause.
        Interrupted: A signal stopped the run.
    """
    launched = read_launcher()
    nproc, several = _check(settings)
    if launched is not None and launched.rank.world_size > 1:
        _refuse_what_the_launcher_does(settings, launched)
        _be_rank(settings, launched)
    if settings.preflight:
        from dure.preflight.before_run import refuse_unless_ready  # imported only if needed, to keep other starts fast

        refuse_unless_ready(_preflight_settings(settings, nproc, several))
    facts = {
        "command": "dure run",
        "script": settings.script if settings.is_module else Path(settings.script).name,
        "arguments": list(settings.arguments),
        "max_restarts": settings.max_restarts,
    }
    with join(several, facts, nproc) as nodes:
        met = meet_in_folder(
            nodes,
            lambda: new_folder(settings, Path(settings.script).absolute().stem, "run", for_script=True),
            lambda name: new_folder(replace(settings, name=name), "", "", for_script=True),
        )
        run, is_own = met.run, met.is_own  # on a node that sees another node's folder, only logs are added there
        with run.lock() if is_own else nullcontext(), ExitStack() as until:
            if is_own:
                run.write_script(_record(settings, nodes))
            began = time.time()
            notes = Notes(run=run, nodes=nodes, max_restarts=settings.max_restarts, needs_records=False)
            outcome = _start(settings, notes, until)
            _finish(run, outcome, time.time() - began, nodes.world_size, is_own=is_own)
            return run.path


def _be_rank(settings: ScriptSettings, launched: Launched) -> NoReturn:
    """Run the script as the rank that a launcher started, and exit with its exit code."""
    from dure.comm.meeting import Meeting
    from dure.launch.scripts.script_worker import main

    rank = launched.rank
    end_with_launcher()
    meeting = Meeting(rank, meeting_point(launched), timeout_seconds=settings.rendezvous_timeout)
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    place = place_under(launched, meeting.store_of_this_start(), settings.threads, round_number=restarts)
    num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", -(-rank.world_size // rank.local_world_size)))
    most_restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    job = _job(settings, os.environ.get("TORCHELASTIC_RUN_ID", launched.by), num_nodes, most_restarts)
    os.environ.update(interface_variables(meeting.interface))
    code = main(job, place)
    if code == 0:  # a failure must be visible at once
        meeting.leave()
    leave(code)


def _refuse_what_the_launcher_does(settings: ScriptSettings, launched: Launched) -> None:
    by, num_here = launched.by, launched.rank.local_world_size
    unset = ScriptSettings(script=settings.script)
    its_own = (
        "max_restarts",
        "on_hang",
        "hang_after",
        "nnodes",
        "node_rank",
        "rendezvous",
        "secret_file",
        "preflight",
        "record",
        "trace",
    )
    given = [name for name in (*its_own, "start", "name") if getattr(settings, name) != getattr(unset, name)]
    faults = [
        f"--{name.replace('_', '-')} is for ranks that dure starts itself, but {by} started this one: leave it out"
        for name in given
    ]
    if settings.nproc not in ("auto", str(num_here)):
        faults.append(f"nproc is {settings.nproc} but {by} started {num_here} processes here: leave --nproc out")
    if faults:
        raise SpecInvalid(faults)


def _preflight_settings(settings: ScriptSettings, nproc: int, several: NodeSettings | None) -> PreflightSettings:
    """Return the settings of a preflight for a script, whose needs are unknown: those of most scripts."""
    kind = resolve_device("auto")
    return PreflightSettings(
        num_ranks=nproc,
        num_devices=nproc,
        device=kind,
        backend=device_backend(kind) or OVER_SOCKETS,
        threads=settings.threads,
        runs_dir=settings.runs_dir,
        start=settings.start,
        several=several,
        command="dure run --preflight",
    )


def _record(settings: ScriptSettings, nodes: Nodes) -> dict[str, Any]:
    return {
        "script": settings.script if settings.is_module else str(Path(settings.script).resolve()),
        "is_module": settings.is_module,
        "num_arguments": len(settings.arguments),
        "world_size": nodes.world_size,
        "hosts": [] if nodes.is_alone else [member.host for member in nodes.members],
    }


def _start(settings: ScriptSettings, notes: Notes, until: ExitStack) -> Outcome:
    run, nodes = notes.run, notes.nodes
    nproc, first = nodes.me.num_ranks, nodes.first_rank
    shown = None if settings.shown_ranks is None else {int(rank) for rank in settings.shown_ranks.split(",")}

    def voice_of(rank: int) -> Voice:
        prefix = f"[rank {rank}] " if settings.with_prefix else ""
        is_shown = not settings.is_silent and (shown is None or rank - first in shown)
        return Voice(log=run.log_path(rank), consoles=(1, 2) if is_shown else (None, None), prefix=prefix)

    launch = Launch(
        entry=_ENTRY,
        job=_job(settings, run.name, len(nodes.members), settings.max_restarts, run.path),
        nodes=nodes,
        threads=threads_for(settings.threads, nproc),
        store_prefix="",
        start=settings.start,
        restarts=RestartPolicy(most=settings.max_restarts, after_any=True),
        serves_store=True,
        stop_grace_seconds=settings.grace_seconds,
        grace_seconds=settings.grace_seconds,
        end_grace_seconds=None,
        hangs=HangPolicy(hang_after=settings.hang_after, action=settings.on_hang, counts_calls=True),
    )
    # a single rank keeps the terminal, for a debugger or a progress bar
    keeps_terminal = nproc == 1 and nodes.is_alone and not settings.is_silent
    return run_ranks(launch, notes, None if keeps_terminal else Voices(of=voice_of, is_read_at_once=True), until)


def _job(
    settings: ScriptSettings, run: str, num_nodes: int, max_restarts: int, folder: Path | None = None
) -> ScriptJob:
    """Return the job of every rank.

    Args:
        settings: Settings of the run.
        run: Its name.
        num_nodes: Number of nodes.
        max_restarts: Restarts of all ranks after one failed.
        folder: Run folder; None if a launcher started the ranks, which then have none.
    """
    return ScriptJob(
        script=settings.script,
        arguments=tuple(settings.arguments),
        is_module=settings.is_module,
        local_rank_argument=settings.local_rank_argument,
        max_restarts=max_restarts,
        run=run,
        role=settings.role,
        num_nodes=num_nodes,
        records=str(folder.resolve()) if settings.record and folder is not None else None,
        observer=settings.observer,
        trace=settings.trace,
        face=settings.face,
    )


def _module_fault(name: str) -> str | None:
    """Return a sentence about a module that cannot be there, or None.

    Only the outermost package is looked for. To look inside, Python would import it, and its code belongs to the ranks.
    """
    if name.endswith(".py") and Path(name).is_file():
        return f"{name} is a file and no module: leave -m out"
    sys.path.insert(0, os.getcwd())
    try:
        is_there = importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        is_there = False
    finally:
        sys.path.pop(0)
    return None if is_there else f"there is no module {name}: give the name that `python -m` takes"


def _check(settings: ScriptSettings) -> tuple[int, NodeSettings | None]:
    """Check the settings; return the number of ranks here, and the settings for several nodes."""
    faults, several = [], None
    script = Path(settings.script)
    if settings.is_module:
        if (fault := _module_fault(settings.script)) is not None:
            faults.append(fault)
    elif not script.is_file() and not (script / "__main__.py").is_file():
        what = "does not exist"
        if script.exists():
            what = "is a folder without a __main__.py" if script.is_dir() else "is neither a file nor a folder"
        cure = "give the path of a Python script, or a module with -m"
        if Path(settings.script.rpartition(":")[0]).is_file():
            what, cure = "is a task", f"train it with `dure train {shell_word(script)}`"
        faults.append(f"{script} {what}: {cure}")
    nproc = 1
    if settings.nproc == "auto":
        nproc = count_all_accelerators() or 1
    elif settings.nproc == "cpu":
        nproc = count_cores()
    elif settings.nproc == "gpu":
        nproc = count_all_accelerators()
        if not nproc:
            faults.append("nproc is gpu but torch sees none here: use --nproc cpu, or a number")
    elif re.fullmatch(r"[0-9]{1,9}", settings.nproc) and 0 < int(settings.nproc) <= MOST_PROCESSES:
        nproc = int(settings.nproc)
    else:
        faults.append(f"nproc is {settings.nproc!r} but must be from 1 to {MOST_PROCESSES}, auto, gpu or cpu")
    if settings.shown_ranks is not None and not re.fullmatch(r"\d+(,\d+)*", settings.shown_ranks):
        faults.append(f"local_ranks_filter is {settings.shown_ranks!r} but must be local ranks, as 0,1")
    threads = 1 if settings.threads is None else settings.threads
    hang_after = 1.0 if settings.hang_after is None else settings.hang_after
    faults += [
        f"{name} is {value:g} but must be a number {words}"
        for name, value, is_right, words in (
            ("max_restarts", settings.max_restarts, settings.max_restarts >= 0, "of at least 0"),
            ("hang_after", hang_after, 0 < hang_after < inf, "above 0"),
            ("grace_seconds", settings.grace_seconds, 0 < settings.grace_seconds < inf, "above 0"),
            ("threads", threads, 0 < threads <= MOST_THREADS, f"above 0 and of at most {MOST_THREADS}"),
        )
        if not is_right
    ]
    try:
        several = nodes_asked_for(settings, settings.nnodes)
    except SpecInvalid as error:
        faults += error.faults
    if settings.nnodes > 1 and (settings.max_restarts > 0 or settings.on_hang == "restart"):
        faults.append(
            "ranks on several nodes are not started again: leave --max-restarts and --on-hang restart out, and let the "
            "script go on from its own checkpoint"
        )
    elif settings.on_hang == "restart" and settings.max_restarts == 0:
        faults.append(
            "on_hang is restart but max_restarts is 0, so nothing would be started again: add --max-restarts 3"
        )
    if faults:
        raise SpecInvalid(faults)
    return nproc, several


def _finish(run: RunDir, outcome: Outcome, seconds: float, world_size: int, *, is_own: bool) -> None:
    """Record the end of the run, and raise an error unless it succeeded."""
    error: DureError | None = failure_of(outcome, outcome.judge(run.path, is_script=True))
    if error is None and outcome.stopped_by is not None:
        how = how_stopped(outcome.ends) if outcome.signal is None else ""
        error = Interrupted(f"stopped{how and ': '}{how}", stop_exit_code(outcome.stopped_by))
    with records_missed(error):
        if is_own:
            message = None if error is None else str(error)
            summary = ScriptSummary(
                status=status_of(error), world_size=world_size, wall_seconds=seconds, message=message
            )
            run.write_end(summary.to_json())
        for end in outcome.ends:
            if end.failure is not None:
                run.write_json(failure_file(end.rank), failure_to_json(end.failure))
    if is_own:
        write_trace_of_ranks(run)
    if error is not None:
        raise error
