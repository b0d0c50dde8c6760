"""Process of one rank, as polled and signalled by its supervisor."""

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dure.documents import DocumentInvalid, parse_json
from dure.failures.record import Departure, FailureRecord, departure_from_json, failure_from_json
from dure.failures.verdict import STOP_ENDS, WorkerEnd
from dure.host.oom import OomWatch
from dure.launch.worker.leftovers import mark_of, started_at
from dure.launch.worker.questions import Questions
from dure.launch.worker.stacks import end_frames, is_stopped
from dure.process.context import CUT, DEPARTURE

REPORT_LIMIT_BYTES = 2**22
"""Maximum bytes read of a rank's failure report."""


@dataclass(eq=False)
class Worker:
    """Process of one rank."""

    rank: int
    pid: int
    report_fd: int
    """Descriptor of an unnamed file for the report of a rank that fails, which works even if the disk is full."""
    stacks_fd: int
    """Descriptor of an unnamed file for its Python stacks, written on a signal or at a crash."""
    questions: Questions
    """Channel for requests for the rank's state."""
    process: "subprocess.Popen[bytes] | None" = None
    """Handle of a spawned worker; None for a forked one."""
    pidfd: int | None = None
    is_expendable: bool = False
    has_begun: Callable[[], bool] = lambda: True
    """Function that returns True once the rank has trained: before that, all ranks need each other."""
    end: WorkerEnd | None = None
    keeps_terminal: bool = False
    """True if its streams are those of the supervisor."""
    was_stopped: bool = False
    was_held: bool = False
    last_line: str | None = None
    handled: str | None = None
    left_group_at: float | None = None
    was_asked_to_stop: bool = False

    def __post_init__(self) -> None:
        self.oom = OomWatch(self.pid)
        self.mark, self.started_at = mark_of(self.stacks_fd), started_at(self.pid)

    def poll(self) -> None:
        """Record the end, if it has ended."""
        if self.process is not None:
            code = self.process.poll()
        else:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            code = None if pid == 0 else os.waitstatus_to_exitcode(status)
        if code is None:
            self.oom.look()
        else:
            failure, departure = _failure_and_departure(_read_report(self.report_fd) or {})
            # an exception is due to the task, and would recur on another rank; a kill is due to the machine
            was_killed = code < 0 and code not in STOP_ENDS and not self.was_stopped and failure is None
            is_out_of_memory = self.oom.was_killed() if was_killed and code == -signal.SIGKILL else None
            crash, is_at_crash = end_frames(self.stacks_fd, -code) if code < 0 and not self.was_stopped else ((), False)
            self.end = WorkerEnd(
                rank=self.rank,
                exit_code=code,
                time=time.time(),
                was_stopped=self.was_stopped,
                was_held=self.was_held,
                last_line=self.last_line,
                handled=self.handled,
                left_group_at=self.left_group_at,
                failure=failure,
                departure=departure,
                is_tolerated=self.is_expendable and was_killed and self.has_begun(),
                is_out_of_memory=is_out_of_memory,
                memory_limit_bytes=self.oom.limit_bytes() if is_out_of_memory else None,
                was_asked_to_stop=self.was_asked_to_stop,
                crash=crash,
                is_at_crash=is_at_crash,
            )
            self._close()

    def reported_failure(self) -> FailureRecord | None:
        """Return the failure that it has reported although it still runs, as it does while its threads go on."""
        if self.end is not None or not os.fstat(self.report_fd).st_size:
            return None
        return _failure_and_departure(_read_report(self.report_fd) or {})[0]

    def asked_cut(self) -> float | None:
        """Return for how many seconds it requests its host's silence, once."""
        if self.end is not None or not os.fstat(self.report_fd).st_size:
            return None
        seconds = (_read_report(self.report_fd) or {}).get(CUT)
        if seconds is not None:
            os.ftruncate(self.report_fd, 0)
        return None if seconds is None else float(seconds)

    def send(self, number: int) -> None:
        """Send a signal, unless the process is gone."""
        if self.end is None:
            with suppress(ProcessLookupError):  # a handler may send one while `poll` reads the report
                os.kill(self.pid, number)

    def ask_to_stop(self, number: int, *, is_sent: bool) -> None:
        """Send a stop signal, unless it has reached the process already; its exit code may follow it from now on."""
        self.was_asked_to_stop = True
        if is_sent:
            self.send(number)

    def stop_at_once(self) -> None:
        """Kill it, and record that the supervisor caused this end."""
        if self.end is None:
            self.was_stopped, self.was_held = True, is_stopped(self.pid)
            self.send(signal.SIGKILL)

    def _close(self) -> None:
        os.close(self.report_fd)
        os.close(self.stacks_fd)
        self.questions.close()
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None


def unnamed_file(name: str) -> int:
    """Open a file without a name in any file system, in memory if the system supports that."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _failure_and_departure(report: Mapping[str, Any]) -> tuple[FailureRecord | None, Departure | None]:
    """Return the report of a rank that has ended: a failure, a departure, or neither if it is damaged."""
    with suppress(DocumentInvalid):
        if DEPARTURE in report:
            return None, departure_from_json(report[DEPARTURE])
        return failure_from_json(report), None
    return None, None


def _read_report(descriptor: int) -> dict[str, Any] | None:
    data = os.pread(descriptor, REPORT_LIMIT_BYTES, 0)
    try:
        report = parse_json(data) if data else None
    except DocumentInvalid:  # it was killed while it wrote
        return None
    return report if isinstance(report, dict) else None
