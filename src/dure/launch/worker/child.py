"""Start and end of a worker process."""

import errno
import gc
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TextIO

from dure.launch.worker.leftovers import MARK_VARIABLE, mark_of
from dure.launch.worker.responder import observe
from dure.own_files import open_own
from dure.process.context import Place
from dure.process.own_descriptors import keep
from dure.process.parent_death import die_with_parent
from dure.process.stop_signals import HELD_SIGNALS, handled_signals

_is_worker = False


def is_worker() -> bool:
    """Return whether dure's supervisor started this process, and not to run a script."""
    return _is_worker


def be_a_script() -> None:
    """Let the code of this worker call what trains and evaluates, as under another launcher."""
    global _is_worker
    _is_worker = False


@dataclass(frozen=True, kw_only=True)
class Output:
    """Output of a worker, and whether it reads the terminal."""

    log: str | None = None
    """Log file for both streams; None for the terminal, where stdout is joined to stderr, or the descriptors below."""
    descriptors: tuple[int, int] | None = None
    """Descriptors for stdout and stderr; None if they are the log's or the terminal's."""
    has_live_line: bool = False
    """True if the reader of the descriptors shows an unfinished line on a terminal and overwrites it."""
    is_terminal: bool = False
    """True if all three streams are unchanged."""


def run_in_child(entry: Callable[[Place], int], place: Place, output: Output, parent_pid: int) -> None:
    """Make this new process a worker, run it, and end without returning to the parent's code.

    `os._exit` keeps the interpreter's shutdown from destroying torch's threads in an order that aborts: about one in
    four plain DDP scripts that finish ends with SIGABRT.
    """
    global _is_worker
    code = 1
    try:
        _is_worker = True
        die_with_parent(parent_pid)
        redirect_output(output)
        os.environ.update(place.rank.to_environment())
        os.environ.update(interface_variables(place.interface))
        place = _out_of_reach(place)
        if place.stacks_fd is not None:
            os.environ[MARK_VARIABLE] = mark_of(place.stacks_fd)
        # live objects belong to the parent's copy: collecting them here would only touch, and so copy, their pages
        gc.freeze()
        _accept_signals()
        observe(place)
        code = entry(place)
    except BaseException:  # nothing may unwind into the supervisor's frames, of which this process has a copy
        import traceback

        from dure.terminal import print_traceback

        print_traceback(traceback.format_exc())
    finally:
        leave(code)


def _out_of_reach(place: Place) -> Place:
    """Move the supervisor's descriptors to numbers that code which closes or opens descriptors does not reach."""

    def kept(descriptor: int | None) -> int | None:
        return None if descriptor is None else keep(descriptor)

    return replace(
        place,
        report_fd=kept(place.report_fd),
        heartbeat_fd=kept(place.heartbeat_fd),
        stacks_fd=kept(place.stacks_fd),
        questions_fd=kept(place.questions_fd),
        snapshot_fds=tuple(keep(descriptor) for descriptor in place.snapshot_fds),
    )


def interface_variables(interface: str | None) -> dict[str, str]:
    """Return the variables that name the network interface for gloo and NCCL; the user's settings are kept."""
    if interface is None:
        return {}
    # `=`: exactly this interface, not all whose names have this prefix
    named = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {name: value for name, value in named.items() if name not in os.environ}


def _accept_signals() -> None:
    # A forked copy of the supervisor's handlers would forward signals to the other ranks, and Python's own for SIGINT
    # unwinds from anywhere. Until the entry installs its own, a signal simply ends this process, which has done nothing
    # yet.
    for number in handled_signals():
        signal.signal(number, signal.SIG_DFL)
    if callable(signal.getsignal(signal.SIGTSTP)):  # the supervisor's handler would stop other ranks, and too late
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)


def leave(code: int) -> NoReturn:
    """End this process now, after flushing its output."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)  # even if the terminal is gone and flushing raises


def redirect_output(output: Output) -> None:
    """Redirect the output of this process to its destination.

    The results of a run go to stdout, and its workers have none: `--json` must find nothing else there.
    """
    sys.stdout.flush()
    if output.is_terminal:
        return
    if output.has_live_line:
        _export_terminal_size()
    if output.descriptors is not None:
        os.dup2(output.descriptors[0], 1)
        os.dup2(output.descriptors[1], 2)
    elif output.log is None:
        os.dup2(2, 1)
    else:
        descriptor = open_own(output.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    quiet_input = os.open(os.devnull, os.O_RDONLY)
    os.dup2(quiet_input, 0)
    os.close(quiet_input)
    # Python's own streams may be replaced by the caller (a notebook, a test): workers write to the descriptors
    sys.stdout = sys.__stdout__ = _stream(1, "<stdout>", sys.stdout)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "<stderr>", sys.stderr)  # type: ignore[misc]


def _export_terminal_size() -> None:
    """Set the size of the terminal in the variables for it, for code that draws bars and cannot query a pipe."""
    with suppress(OSError):
        columns, lines = os.get_terminal_size(2)
        os.environ.setdefault("COLUMNS", str(columns))
        os.environ.setdefault("LINES", str(lines))


class _MaybeRead(io.FileIO):
    """Output that is discarded once its reader is gone: a run must not end because `| head` did, or a terminal."""

    def __init__(self, descriptor: int, name: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.name = name
        self._given = os.fstat(descriptor)

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            is_reader_gone = error.errno in (errno.EPIPE, errno.EIO)
            # a script may have put its own pipe or socket there, which must not be replaced
            if not is_reader_gone or not os.path.samestat(self._given, os.fstat(self.fileno())):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


class _Unbuffered(io.BufferedWriter):
    """Output that is passed to the system at once."""

    def write(self, data: Any) -> int:
        written = super().write(data)
        self.flush()
        return written


def _stream(descriptor: int, name: str, before: TextIO) -> "io.TextIOWrapper[Any]":
    raw = _MaybeRead(descriptor, name)
    encoding, errors = getattr(before, "encoding", None), getattr(before, "errors", None) or "replace"
    # unbuffered: output in a buffer, such as the dots of a bar, would be lost if a rank is killed
    stream = io.TextIOWrapper(_Unbuffered(raw), encoding=encoding, errors=errors, write_through=True)
    stream.mode = "w"  # type: ignore[misc]  # as Python's own streams have it
    return stream
