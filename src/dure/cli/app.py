"""`dure`: selection of the verb, and conversion of errors into messages and exit codes."""

import atexit
import errno
import gc
import importlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import NamedTuple

from cyclopts import App
from cyclopts.exceptions import (
    CycloptsError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
    ValidationError,
)

from dure.cli.output import installed_version, is_reporter
from dure.errors import DONE, FAILED, DureError, EnvironmentLacks, Misuse, SpecInvalid, WorkerFailed
from dure.process.stop_signals import (
    Terminated,
    end_by,
    end_if_unanswered,
    forget_stop,
    handled_signals,
    stop_exit_code,
)
from dure.terminal import print_status, replace_what_no_terminal_has, shell_word


class Verb(NamedTuple):
    """Command. Its module is imported on demand; the list of all commands imports none."""

    module: str
    summary: str
    """One-line description in the list of commands: the first line of the command's own help."""


VERBS = {
    "train": Verb("train", "Train a task, or resume a run."),
    "run": Verb("run", "Run any PyTorch script on many ranks, unchanged: torchrun's variables are set."),
    "horovodrun": Verb("horovodrun", "Run a Horovod script on many ranks: the flags of horovodrun."),
    "preflight": Verb(
        "preflight",
        "Check that these machines are ready for a run: versions, network, clocks, limits, disk, GPUs, a collective.",
    ),
    "eval": Verb("evaluate", "Measure a run's best checkpoint on the evaluation data, every sample once."),
    "export": Verb("export", "Write a run's weights, under the model's own names, into one safetensors file."),
    "export-records": Verb(
        "export_records",
        "Write a run's records as a table (CSV, Parquet), or its last steps as a timeline for Perfetto (JSON).",
    ),
    "strategies": Verb(
        "strategies", "Show the strategies: what each divides, what it preserves of the one-device run, what it needs."
    ),
    "runs": Verb("runs", "Show the runs of a folder: status, strategy and devices, samples, best metric."),
    "diff": Verb(
        "judging.diff", "Show where two runs differ: settings, samples, losses, weights. Exits with 4 if they do."
    ),
    "doctor": Verb(
        "judging.doctor",
        "Explain a run: which rank failed or hung first, where, what makes it slow, and what to do.",
    ),
    "lint": Verb(
        "judging.lint",
        "Look for the faults of distributed scripts in their source, which is not run. Exits with 4 if it finds some.",
    ),
    "prove": Verb(
        "judging.prove",
        "Compare a script on several ranks with one process, step by step. Exits with 4 unless they are equal.",
    ),
    "compare": Verb(
        "judging.compare",
        "Compare strategies on a task by short runs in turns: speed, memory, bytes, losses, what is not preserved.",
    ),
    "scale": Verb(
        "judging.compare",
        "Measure a task on more and more processes: speed, what is lost to what, where to stop.",
    ),
    "report": Verb(
        "judging.report",
        "Write a run as one HTML page, which opens offline: findings, losses, times, lateness, events, settings.",
    ),
    "watch": Verb(
        "judging.watch",
        "Watch a run: its page, live in a browser of this host, metrics for Prometheus, or a view in the terminal.",
    ),
    "submit": Verb("submit", "Hand a run to Slurm, Kubernetes or Ray."),
    "bench": Verb("bench", "Measure collectives between processes of this host, and fit what a link costs."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments after the program's name; None for those of `sys.argv`.

    Returns:
        The exit code, one of those in docs/settings.md.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    if tokens[:1] not in (["run"], ["horovodrun"]):  # these leave the streams to the script
        replace_what_no_terminal_has()
    # with torch loaded, the interpreter would spend 0.8 s at exit on collecting what the system frees at once
    atexit.register(gc.freeze)
    try:
        with _ending_in_order(is_program=argv is None):
            _run(tokens)
        sys.stdout.flush()
    except DureError as error:
        if is_reporter() or (isinstance(error, WorkerFailed) and error.exit_code == FAILED):
            print_status(_sentence(error))
        else:
            time.sleep(REPORTER_SECONDS)
        return error.exit_code
    except KeyboardInterrupt as stop:
        print_status("stopped")
        return stop_exit_code(stop.number if isinstance(stop, Terminated) else signal.SIGINT)
    except BrokenPipeError:
        # the reader of our output has gone (`dure runs | head`); prevent a message from the interpreter's own flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        if error.errno in (errno.EACCES, errno.ENAMETOOLONG) and isinstance(error.filename, str | bytes):
            print_status(f"{os.fsdecode(error.filename)} cannot be used: {error.strerror}")
            return Misuse.exit_code
        if error.errno != errno.ENOSPC or not _is_stdout_full():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes again
        print_status(f"the result cannot be written to stdout ({error.strerror}): send it elsewhere")
        return Misuse.exit_code
    except Exception as error:
        if not _is_of_torch(error):
            raise
        what = str(error).strip().partition("\n")[0].removesuffix(".")
        cure = "repair its installation, raise the limits (ulimit -v), or correct its variables in the environment"
        print_status(f"torch cannot be loaded ({what}): {cure}")
        return EnvironmentLacks.exit_code
    return DONE


def _is_of_torch(error: Exception) -> bool:
    """Return whether torch itself could not be imported; an error of a task's own import does not get here.

    Torch reads some environment variables while it is imported.
    """
    if isinstance(error, ImportError) and error.name == "torch":
        return True
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(code.co_name == "<module>" and f"{os.sep}torch{os.sep}" in code.co_filename for code in codes)


def _is_stdout_full() -> bool:
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return True
    return False


def _open_closed_streams() -> None:
    """Open closed standard streams (as under cron), whose numbers the next opened files would otherwise get."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


REPORTER_SECONDS = 1.0
"""Delay before a rank that does not report for all ends: torchrun ends the others as soon as one has ended."""


@contextmanager
def _ending_in_order(*, is_program: bool) -> Iterator[None]:
    """End the command in order when a stop signal arrives; when it is over, a signal has the system's own effect.

    Args:
        is_program: True if the process ends with the command. Ctrl-C then must not raise in what is left to do, such as
            finalizers of libraries: it would print a traceback.
    """

    def end(number: int, frame: FrameType | None) -> None:
        end_by(number)

    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows handlers only in the main thread
        return
    before = {number: signal.signal(number, end) for number in handled_signals() if number != signal.SIGINT}
    forget_stop()
    try:
        yield
    except Exception:
        end_if_unanswered()  # an import may have replaced handlers
        raise
    finally:
        if is_program and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def build_app(command: Callable[..., None] | None = None, name: str = "") -> App:
    """Build the parser of one command, or of all commands as far as their list requires it."""
    app = App(
        name="dure",
        help="Train a PyTorch model on one device or many, with the same result.",
        help_format="plaintext",
        help_epilogue="dure COMMAND --help shows a command's flags, dure train FILE:Task --help that task's own too.",
        version=installed_version,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    if command is not None:
        app.command(command, name=name, help_epilogue=getattr(command, "more_help", ""))
        return app
    for listed, verb in VERBS.items():
        app.command(App(name=listed, help=verb.summary))
    return app


def _run(tokens: list[str]) -> None:
    command, name = None, tokens[0] if tokens else ""
    if name in VERBS:
        module = importlib.import_module(f"dure.cli.{VERBS[name].module}")
        tokens, command = module.read(tokens)
    app = build_app(command, name)
    with _flags_in_messages() if name in VERBS else nullcontext():
        try:
            app(tokens, exit_on_error=False, print_error=False)
        except CycloptsError as error:
            raise Misuse(_parse_fault(error, app)) from None


def _flags_in_messages() -> AbstractContextManager[None]:
    from dure.spec.arguments import flags_in_messages  # half of the time of `dure --help`, which does not need it

    return flags_in_messages()


def _parse_fault(error: CycloptsError, app: App) -> str:
    """Return the error in the command line as a message; unknown names come with the known ones."""
    # half of the time of `dure --help`, which does not need it
    from dure.spec import SETTINGS, flag_name, option_names, requirement, unknown_name, unknown_setting
    from dure.spec.old_names import SETTINGS as OLD_SETTINGS
    from dure.spec.old_names import STRATEGIES_WITH

    if isinstance(error, UnknownOptionError):
        spelled = (error.token.keyword or error.token.value).split("=")[0]
        known = sorted({name for argument in error.argument_collection for name in argument.names})
        flags = [name for name in known if name.startswith("--") and not name.startswith("--no-")]
        settings = [flag.removeprefix("--").replace("-", "_") for flag in [*flags, "--help"]]
        if error.command_chain in (("train",), ("submit",)):
            from dure.strategies.table import STRATEGIES

            settings = [name for name in settings if name not in (*STRATEGIES_WITH, *OLD_SETTINGS)]
            settings += [name for name in option_names(STRATEGIES) if name not in settings]
        help_ = f"`dure {' '.join(error.command_chain or ())} --help` lists all"
        is_script = error.command_chain == ("run",)
        fault = unknown_setting("flag", spelled, settings, flag_name, help_, has_task=not is_script)
        return f"{fault}; a flag of the script's own stands after the script" if is_script else fault
    if isinstance(error, UnknownCommandError) and error.unused_tokens:
        token = error.unused_tokens[0]
        if ".py" in token:
            verb = "train" if ":" in token else "run"
            return f"unknown command {token!r}: write `dure {verb} {shell_word(token)}`"
        known = ["--help", "--version"] if token.startswith("-") else [*VERBS]
        return unknown_name("flag" if token.startswith("-") else "command", token, known)
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        verb = " ".join(error.command_chain or ())
        return f"{error.unused_tokens[0]!r} is one argument too many: see `dure {verb} --help`"
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        name, verb = error.argument.name, " ".join(error.command_chain or ())
        fault = f"flag {name} has no value" if name.startswith("-") else f"{name} is missing"
        return f"{fault}: see `dure {verb} --help`"
    if isinstance(error, RepeatArgumentError) and error.token is not None:
        return f"flag {error.token.keyword} is given twice: see `dure {' '.join(error.command_chain or ())} --help`"
    if isinstance(error, ValidationError) and error.argument is not None:
        flag = error.argument.name
        name = flag.removeprefix("--").replace("-", "_")
        if name in SETTINGS:
            value = error.argument.tokens[-1].value if error.argument.tokens else "nothing"
            return f"flag {flag}: {name} is {value!r} but must be {requirement(name)}"
    text = str(error).strip().rstrip(".")
    return f"{text[:1].lower()}{text[1:]}: see `{' '.join(['dure', *(error.command_chain or ())])} --help`"


def _sentence(error: DureError) -> str:
    """Return an error for display: one sentence, or a line for each of several faults."""
    if isinstance(error, SpecInvalid) and len(error.faults) > 1:
        return "\n".join([f"{len(error.faults)} settings are invalid:", *(f"  {fault}" for fault in error.faults)])
    return str(error)
