"""Running somebody's script on many ranks: `dure run`."""

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dure.errors import DureError, Interrupted, SpecInvalid, WorkerFailed
from dure.launch.child import Output
from dure.launch.hang import HangVerdict
from dure.launch.log_pump import LogPump
from dure.launch.restarts import Restart, RestartPolicy
from dure.launch.supervisor import Outcome, run_workers
from dure.launch.verdict import judge, stop_signal
from dure.launch.watchdog import HangPolicy
from dure.launch.workers import Launch
from dure.machine import count_accelerators, count_cores
from dure.rundir import SUMMARY, RunDir, default_name
from dure.stopping import stop_exit_code

_ENTRY = "dure.launch.script_worker"
_GRACE_SECONDS = 30.0
"""What a script has to end after a signal, as under torchrun."""


@dataclass(frozen=True, kw_only=True)
class ScriptSettings:
    """What to run, and how."""

    script: str
    """A path, or a module's name."""
    arguments: Sequence[str] = ()
    is_module: bool = False
    nproc: str = "auto"
    """A number, or `auto`: as many as there are accelerators, or one."""
    start: str = "auto"
    max_restarts: int = 0
    on_hang: str = "wait"
    """`wait` only says why: a script may have good reasons to let some ranks wait."""
    hang_after: float | None = None
    threads: int | None = None
    local_rank_argument: str = "auto"
    """`auto`, `none`, `dash` (`--local-rank`) or `underscore` (`--local_rank`)."""
    with_prefix: bool = True
    runs_dir: Path = Path("runs")
    name: str | None = None


def run_script(settings: ScriptSettings) -> None:
    """Run a script on every rank, wait for all, and leave none behind.

    Raises:
        Misuse: There is no such script, or a setting cannot be.
        EnvironmentLacks: The system starts no more processes.
        WorkerFailed: A rank failed; the message names the first cause.
        Interrupted: A signal stopped it.
    """
    nproc = _check(settings)
    label = Path(settings.script).stem
    name = settings.name or default_name(label, "run", datetime.now())
    run = RunDir.create(settings.runs_dir, name, or_numbered=settings.name is None, for_script=True)
    record = {
        "script": settings.script if settings.is_module else str(Path(settings.script).resolve()),
        "is_module": settings.is_module,
        "num_arguments": len(settings.arguments),
        "world_size": nproc,
    }
    with run.lock():
        run.write_script(record)
        began = time.time()
        outcome = _run(settings, nproc, run)
        _finish(run, outcome, time.time() - began)


def _run(settings: ScriptSettings, nproc: int, run: RunDir) -> Outcome:
    paths = [run.log_path(rank) for rank in range(nproc)]
    # one rank alone keeps the terminal: a debugger and a progress bar need it
    pump = closing(LogPump(paths, with_prefix=settings.with_prefix)) if nproc > 1 else nullcontext()
    job = {
        "script": settings.script,
        "arguments": list(settings.arguments),
        "is_module": settings.is_module,
        "local_rank_argument": settings.local_rank_argument,
        "max_restarts": settings.max_restarts,
        "run": run.name,
    }
    with pump as pumped:
        outputs = [Output(is_terminal=True)] if pumped is None else [Output(descriptors=d) for d in pumped.descriptors]
        return run_workers(
            Launch(
                entry=_ENTRY,
                job=job,
                num_processes=nproc,
                threads=settings.threads or max(1, count_cores() // nproc),
                outputs=outputs,
                store_prefix="",
                start=settings.start,
                restarts=RestartPolicy(most=settings.max_restarts, after_any=True),
                on_restart=lambda restart: _note_restart(run, restart, settings),
                serves_store=True,
                stop_grace_seconds=_GRACE_SECONDS,
                end_grace_seconds=None,
                hangs=HangPolicy(hang_after=settings.hang_after, action=settings.on_hang),
                on_hang=lambda hang: _note_hang(run, hang),
            )
        )


def _check(settings: ScriptSettings) -> int:
    """Refuse what cannot be; return the number of ranks."""
    faults = []
    script = Path(settings.script)
    if settings.is_module:
        sys.path.insert(0, os.getcwd())
        try:
            is_there = importlib.util.find_spec(settings.script) is not None
        except (ImportError, ValueError):
            is_there = False
        finally:
            sys.path.pop(0)
        if not is_there:
            faults.append(f"there is no module {settings.script}: give the name that `python -m` takes")
    elif not script.is_file():
        what = "is a folder" if script.is_dir() else "does not exist"
        faults.append(f"{script} {what}: give the path of a Python script, or a module with -m")
    nproc = 1
    if settings.nproc == "auto":
        nproc = count_accelerators("cuda") or 1
    elif settings.nproc.isdecimal() and int(settings.nproc) > 0:
        nproc = int(settings.nproc)
    else:
        faults.append(f"nproc is {settings.nproc!r} but must be a whole number above 0, or auto")
    faults += [
        f"{name} is {value:g} but must be a number {words}"
        for name, value, is_right, words in (
            ("max_restarts", settings.max_restarts, settings.max_restarts >= 0, "of at least 0"),
            ("hang_after", settings.hang_after or 0, settings.hang_after is None or settings.hang_after > 0, "above 0"),
            ("threads", settings.threads or 0, settings.threads is None or settings.threads > 0, "above 0"),
        )
        if not is_right
    ]
    if faults:
        raise SpecInvalid(faults)
    return nproc


def _note_restart(run: RunDir, restart: Restart, settings: ScriptSettings) -> None:
    run.append_event("restart", number=restart.number, rank=restart.rank, step=restart.step, message=restart.cause)
    _say(f"{restart.cause}\n      restart {restart.number} of {settings.max_restarts}")


def _note_hang(run: RunDir, hang: HangVerdict) -> None:
    with suppress(DureError):
        run.note_hang(hang.to_json())
    _say(hang.text)


def _say(text: str) -> None:
    with suppress(OSError):
        print(f"dure: {text}", file=sys.stderr, flush=True)


def _finish(run: RunDir, outcome: Outcome, seconds: float) -> None:
    """Write how it ended, and raise what is not success."""
    stopped_by = outcome.signal if outcome.signal is not None else stop_signal(outcome.ends)
    error: DureError | None = None
    verdict = judge(run.path, outcome.ends, stopped_by, is_script=True)
    if outcome.hang is not None:
        error = WorkerFailed("the ranks were ended because they hung (--on-hang)")
    elif verdict is not None:
        refusal = "" if outcome.refusal is None else f"\n{outcome.refusal}"
        error = WorkerFailed(verdict.text + refusal, verdict.exit_code)
    elif stopped_by is not None:
        error = Interrupted("stopped", stop_exit_code(stopped_by))
    for end in outcome.ends:
        if end.failure is not None:
            run.write_json(f"logs/failure-rank{end.rank}.json", end.failure)
    status = "completed" if error is None else "interrupted" if isinstance(error, Interrupted) else "failed"
    summary: dict[str, Any] = {
        "status": status,
        "world_size": len(outcome.ends),
        "wall_seconds": seconds,
        "message": None if error is None else str(error),
    }
    run.write_json(SUMMARY, summary)
    if error is not None:
        raise error
