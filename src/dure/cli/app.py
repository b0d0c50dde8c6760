"""`dure`: finds the verb, and turns whatever goes wrong into a sentence and an exit code."""

import atexit
import gc
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from cyclopts import App
from cyclopts.exceptions import (
    CycloptsError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
    ValidationError,
)

from dure.cli import bench, diff, evaluate, export, runs, strategies, train
from dure.cli.output import speaks_for_all
from dure.cli.settings import spell_out_truths
from dure.errors import DONE, FAILED, DureError, Misuse, SpecInvalid, WorkerFailed
from dure.spec import RunSpec, requirement, unknown_name
from dure.stopping import heeded_signals, stop_exit_code

VERBS: dict[str, Callable[[], Callable[..., None]]] = {
    "eval": evaluate.command,
    "export": export.command,
    "strategies": strategies.command,
    "runs": runs.command,
    "diff": diff.command,
    "bench": bench.command,
}
"""Every verb but `train`, whose flags depend on the task."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The arguments after the program's name; `sys.argv`'s when None.

    Returns:
        The exit code, one of the README's table.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 gets '?' instead of our traceback
    # with torch loaded, the interpreter spends 0.8 s at its end on collecting what the system takes back at once
    atexit.register(gc.freeze)
    try:
        with _ending_in_order():
            _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except DureError as error:
        if speaks_for_all() or (isinstance(error, WorkerFailed) and error.exit_code == FAILED):
            print(_sentence(error), file=sys.stderr)
        else:
            time.sleep(SPEAKER_SECONDS)
        return error.exit_code
    except KeyboardInterrupt as stop:
        print("dure: stopped", file=sys.stderr)
        return stop_exit_code(stop.number if isinstance(stop, _Terminated) else signal.SIGINT)
    except BrokenPipeError:
        # the reader of our output went away (`dure runs | head`); keep the interpreter's own flush from saying so
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return DONE


SPEAKER_SECONDS = 1.0
"""How long a rank that does not speak for all stays: torchrun ends the others as soon as one has ended."""


class _Terminated(KeyboardInterrupt):
    """Another stop signal, where nobody waits for it with something better: it ends a command as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__()


@contextmanager
def _ending_in_order() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise _Terminated(number)

    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread have handlers
        return
    before = {number: signal.signal(number, end) for number in heeded_signals() if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def build_app(train_command: Callable[..., None]) -> App:
    """Build the parser of all verbs."""
    app = App(
        name="dure",
        help="Train a PyTorch model on one device or many, with the same result.",
        help_format="plaintext",
        help_epilogue="dure COMMAND --help shows a command's flags, dure train FILE:Task --help that task's own too.",
        version=_version,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    app.command(train_command, name="train")
    for name, build in VERBS.items():
        app.command(build(), name=name)
    return app


def _run(tokens: list[str]) -> None:
    tokens = spell_out_truths(tokens)
    rest, train_command = train.read(tokens if tokens[:1] == ["train"] else ())
    app = build_app(train_command)
    try:
        app(rest or tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise Misuse(_parse_fault(error, app)) from None


def _parse_fault(error: CycloptsError, app: App) -> str:
    """Say what is wrong with the command line; unknown names come with the known ones."""
    if isinstance(error, UnknownOptionError):
        said = (error.token.keyword or error.token.value).split("=")[0]
        known = sorted({name for argument in error.argument_collection for name in argument.names})
        flags = [name for name in known if name.startswith("--") and not name.startswith("--no-")]
        return unknown_name("flag", said, [*flags, "--help"])
    if isinstance(error, UnknownCommandError) and error.unused_tokens:
        said = error.unused_tokens[0]
        known = ["--help", "--version"] if said.startswith("-") else ["train", *VERBS]
        return unknown_name("flag" if said.startswith("-") else "command", said, known)
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        verb = " ".join(error.command_chain or ())
        return f"{error.unused_tokens[0]!r} is one argument too many: see `dure {verb} --help`"
    if isinstance(error, ValidationError) and error.argument is not None:
        flag = error.argument.name
        name = flag.removeprefix("--").replace("-", "_")
        if name in RunSpec.model_fields:
            value = error.argument.tokens[-1].value if error.argument.tokens else "nothing"
            return f"flag {flag}: {name} is {value!r} but must be {requirement(name)}"
    said = str(error).strip().rstrip(".")
    return f"{said[:1].lower()}{said[1:]}: see `{' '.join(['dure', *(error.command_chain or ())])} --help`"


def _sentence(error: DureError) -> str:
    """Return an error as it is shown: one sentence, or a line for each of several faults."""
    if isinstance(error, SpecInvalid) and len(error.faults) > 1:
        return "\n".join([f"dure: {len(error.faults)} settings cannot be:", *(f"  {fault}" for fault in error.faults)])
    return f"dure: {error}"


def _version() -> str:
    import importlib.metadata  # a seventh of the time of `dure --help`, which has no use for it

    try:
        return importlib.metadata.version("dure")
    except importlib.metadata.PackageNotFoundError:
        return "unknown: dure is not installed, only on the path"
