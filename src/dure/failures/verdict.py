"""Verdict on the end of ranks, from what they left behind: which failed first, where, and which only followed."""

import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dure.failures.frames import Frame, users_frame
from dure.failures.record import CodeLine, Departure, FailureRecord, failure_file, mentions_timeout, read_failure
from dure.process.stop_signals import STOP_SIGNALS, signal_name, stop_exit_code
from dure.terminal import shortened
from dure.units import format_bytes

_TEXT_BY_SIGNAL: dict[int, str] = {
    signal.SIGKILL: "killed (SIGKILL): by somebody, or by the kernel when memory ran out",
    signal.SIGSEGV: "ended by a crash in native code (SIGSEGV)",
    signal.SIGABRT: "ended by an abort in native code (SIGABRT)",
    signal.SIGBUS: "ended by a crash in native code (SIGBUS): often a full /dev/shm or a file that shrank",
    signal.SIGALRM: "ended by a timer's signal that nothing handled (SIGALRM)",
    signal.SIGVTALRM: "ended by a timer's signal that nothing handled (SIGVTALRM)",
    signal.SIGPROF: "ended by a timer's signal that nothing handled (SIGPROF)",
    signal.SIGXCPU: "ended by the signal of a limit on CPU time (SIGXCPU, ulimit -t)",
}

_KILLED_BY_SOMEBODY = (
    "killed (SIGKILL) by somebody: the kernel has ended nothing of this run for want of memory meanwhile"
)

STOP_ENDS: Mapping[int, int] = {
    code: number
    for number in STOP_SIGNALS
    # an exit code means an orderly stop; a signal, that the rank had only just started, or was exiting
    for code in (stop_exit_code(number), -number)
}
"""Signal that requested a stop, by the exit code of a rank that followed it."""

_MOST_OTHERS = 4
"""Maximum number of further ranks whose own failures are shown after the first."""
_MOST_MESSAGE_LINES, _MOST_TRACEBACK_LINES, _MOST_COLUMNS = 20, 100, 500
"""Maximum number of shown lines of an exception's message and of its traceback, and of characters in each line."""


@dataclass(frozen=True, kw_only=True)
class WorkerEnd:
    """End of a worker process."""

    rank: int
    exit_code: int
    """Exit code as `subprocess` gives it: negative for a signal."""
    time: float
    """Time at which the supervisor noticed the end, in seconds since the epoch."""
    was_stopped: bool
    """True if the supervisor itself ended it, because another rank had failed."""
    was_held: bool = False
    """True if a signal or a debugger had stopped the process when the supervisor ended it."""
    last_line: str | None = None
    """Line at which it was when the supervisor ended it; None if it is unknown."""
    handled: str | None = None
    """Exception that it was handling then; None if there was none, or it only reported a lost rank."""
    left_group_at: float | None = None
    """Time at which it had left the group of all ranks when the supervisor ended it; None if it had not."""
    failure: FailureRecord | None = None
    """Rank's own record of its failure, if it could leave one."""
    departure: Departure | None = None
    """Exit of a script by `sys.exit`; None if it did not exit so."""
    is_tolerated: bool = False
    """True if the others could continue without it."""
    is_out_of_memory: bool | None = None
    """True if the kernel killed it for lack of memory, False if not; None if unknown or not killed."""
    memory_limit_bytes: int | None = None
    """Memory limit of the container or job that was exceeded; None if the host's memory was, or none."""
    crash: tuple[Frame, ...] = ()
    """Frames of the thread that crashed in native code or got the signal, innermost first; of the main thread if no
    Python thread did.
    """
    is_at_crash: bool = False
    """True if the frames are those of the thread that crashed."""
    node: str = ""
    """Name of its node, for messages; empty for a run on one node."""
    was_asked_to_stop: bool = False
    """True if the supervisor forwarded a stop signal to it."""

    @property
    def stop_signal(self) -> int | None:
        """Signal for which it stopped, by its exit code; None if it did not stop for any.

        A script may choose such a code without any signal.
        """
        if self.departure is not None and not (self.departure.may_follow_signal or self.was_asked_to_stop):
            return None
        return STOP_ENDS.get(self.exit_code)

    @property
    def has_failed(self) -> bool:
        """True if it ended with an error that the others could not continue without."""
        return self.exit_code != 0 and self.stop_signal is None and not self.is_tolerated

    @property
    def is_consequence(self) -> bool:
        """True if it ended only because another rank had failed."""
        if self.failure is not None:
            return self.failure.is_consequence
        return self.was_stopped or (self.departure is not None and self.departure.is_consequence)

    @property
    def has_own_cause(self) -> bool:
        """True if it reported a failure of its own; what it does not report may follow from another's."""
        return (self.failure is not None or self.departure is not None) and not self.is_consequence

    @property
    def reported_at(self) -> float:
        """Time at which it failed by its own clock: the supervisor notices ends in any order."""
        if self.failure is not None:
            return self.failure.time
        return self.time if self.departure is None or self.departure.time is None else self.departure.time

    @property
    def left_at(self) -> float:
        """Time at which it had left the group of all ranks; infinity if it had not."""
        report = self.failure or self.departure or self
        return float("inf") if report.left_group_at is None else report.left_group_at

    @property
    def has_timed_out(self) -> bool:
        """True if it reported that it waited for another rank in vain."""
        report = self.failure or self.departure
        return report is not None and (
            report.has_timed_out
            or (self.failure is not None and mentions_timeout(self.failure.message))  # from an older version of dure
        )

    def name(self, num_ranks: int, alone: str = "the worker") -> str:
        """Return the name of the rank for a sentence; a single rank is called `alone`."""
        where = f" on {self.node}" if self.node else ""
        return f"rank {self.rank}{where}" if num_ranks > 1 else alone


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """First causal failure, with a short form of the others."""

    text: str
    exit_code: int
    first: FailureRecord | None
    """Failure record of the first cause; None if that rank left none."""


def judge(
    run: Path, ends: list[WorkerEnd], stopped_by: int | None = None, *, cure: str = "", is_script: bool = False
) -> Verdict | None:
    """Find the first cause among the ranks that failed; return None if none did, or a signal explains every end.

    An exception that only reports the loss of a peer is never the cause if there is another one. A rank that died
    without a report (by a signal) is, unless the supervisor ended it.

    Args:
        run: Run folder.
        ends: End of each rank.
        stopped_by: Signal that requested the stop of the run; None if there was none.
        cure: Way to continue if no rank is known to be at fault, as when one was killed from outside.
        is_script: Whether the program knows nothing of dure.
    """
    ends = [end if end.failure else replace(end, failure=read_failure(run, end.rank)) for end in ends]
    failed = [end for end in ends if end.has_failed]
    if not failed or (stopped_by is not None and all(end.is_consequence for end in failed)):
        return None
    first = _first_cause(ends)
    failure = first.failure
    headline = (
        _silent_end(first, len(ends), cure, is_script=is_script)
        if failure is None
        else _failure_text(first, failure, len(ends), run, is_script=is_script)
    )
    others = [end for end in failed if end is not first]
    lines = [headline, *(_waits(first, others) if failure is None else ())]
    same = [end for end in others if _is_same(end, first)]
    is_found_by_all = failure is not None and failure.is_ours  # each rank may word it in its own way
    own = [end for end in others if end not in same and not is_found_by_all and end.has_own_cause]
    lines += [f"  and {in_brief(end, len(ends))}" for end in sorted(own, key=lambda end: end.rank)[:_MOST_OTHERS]]
    gone = [end for end in others if _has_left_before(end, ends)]
    lines += [f"  rank {end.rank} had left the process group before, and was ended{_at(end.last_line)}" for end in gone]
    # if the first cause left no report, a later error of a rank that had survived its loss may be the real reason
    late = {
        end.rank: found
        for end in others
        if failure is None and (found := end.failure) is not None and found.is_after_loss
    }
    lines += [
        f"  rank {rank} failed after it had lost another: {failure_in_brief(late[rank])}" for rank in sorted(late)
    ]
    followed = [end for end in others if end.rank not in late and all(end not in shown for shown in (same, own, gone))]
    if len(ends) > 1 and followed and not (failure and failure.is_misuse):
        ranks = ", ".join(str(end.rank) for end in sorted(followed, key=lambda end: end.rank))
        lines.append(f"  rank {ranks} ended as a consequence; see logs/ in {run}")
    code = 1 if failure is None else failure.exit_code
    if is_script and failure is None:
        # the script chose that exit code for its user; a rank that hung has none
        by_itself = sorted((end for end in failed if not end.was_stopped), key=lambda end: end.time)
        chosen = first if not first.was_stopped else next(iter(by_itself), first)
        code = chosen.exit_code if chosen.exit_code > 0 else code
    return Verdict(text="\n".join(lines), exit_code=code, first=failure)


def _is_same(end: WorkerEnd, first: WorkerEnd) -> bool:
    """Return whether a rank ended as the first did: all have the same wrong argument, for example."""
    if end.failure is not None and first.failure is not None:
        return end.failure.message == first.failure.message
    if end.failure is not None or first.failure is not None or end.departure is None or first.departure is None:
        return False
    how, of_first = (
        (one.exit_code, one.departure and (one.departure.message, one.departure.user_line)) for one in (end, first)
    )
    return how == of_first and not end.departure.is_consequence


def first_failure(ends: list[WorkerEnd]) -> WorkerEnd | None:
    """Return the end that caused the others, or None if no rank failed."""
    return _first_cause(ends) if any(end.has_failed for end in ends) else None


def _first_cause(ends: list[WorkerEnd]) -> WorkerEnd:
    def order(end: WorkerEnd) -> tuple[bool, bool, float, int]:
        return end.is_consequence, end.was_stopped, end.reported_at, end.rank

    failed = [end for end in ends if end.has_failed]
    first = min(failed, key=order)
    if not first.is_consequence:
        return _first_to_leave(first, failed)
    # a closed connection means that a rank has left, a timeout does not: a rank that timed out comes first
    timed_out = [end for end in failed if not end.was_stopped and end.has_timed_out]
    tolerated = next((end for end in ends if end.is_tolerated), None)
    return tolerated or _silent_cause(ends, failed) or min(timed_out, key=order, default=first)


def _first_to_leave(first: WorkerEnd, failed: list[WorkerEnd]) -> WorkerEnd:
    """Return the rank that left the others before the first to report an error did, or that one if there is none.

    While a rank cleans up, others that have lost it may report errors that do not show the loss.
    """
    if first.failure is None and first.departure is None:
        return first  # a signal ended it
    earliest = min((end for end in failed if not end.is_consequence), key=lambda end: end.left_at)
    return earliest if earliest.left_at < first.reported_at else first


def may_follow_another(ends: list[WorkerEnd]) -> bool:
    """Return whether all ranks that failed lost others, or may have, having left them before they reported errors."""
    failed = [end for end in ends if end.has_failed]
    return bool(failed) and all(end.is_consequence or end.left_at < end.time for end in failed)


def left_early(ends: list[WorkerEnd]) -> Verdict:
    """Return a verdict on an unfinished job of which every rank exited with 0."""
    first = min(ends, key=lambda end: end.time)
    return Verdict(text=_silent_end(first, len(ends)), exit_code=1, first=None)


def stop_signal(ends: list[WorkerEnd]) -> int | None:
    """Return the signal that a rank stopped for, if only ranks received one; None otherwise."""
    return next((end.stop_signal for end in ends if end.stop_signal is not None), None)


def how_stopped(ends: list[WorkerEnd]) -> str:
    """Return a clause on the rank that a signal, sent to it alone, ended first; an empty string if there is none."""
    alone = [end for end in ends if end.stop_signal is not None and not end.was_asked_to_stop]
    first = min(alone, key=lambda end: end.time, default=None)
    if first is None or first.stop_signal is None:
        return ""
    name = signal_name(first.stop_signal)
    how = f"by {name}" if first.exit_code < 0 else f"with exit code {first.exit_code}, as after {name}"
    return f"{first.name(len(ends), 'the script')} ended {how}"


def _silent_cause(ends: list[WorkerEnd], failed: list[WorkerEnd]) -> WorkerEnd | None:
    """Find the rank that the others lost, if they only report lost peers: one that exited with 0, or one that hung."""
    left = [end for end in ends if end.exit_code == 0 and not end.is_consequence]
    has_waited = any(end.has_timed_out for end in failed)
    # without a timeout the others did not wait for it: it was ended because they failed, unless it had an error, or
    # left them, before
    hung = [end for end in failed if end.was_stopped and end.failure is None]
    hung = [end for end in hung if end.departure is None or not end.departure.is_consequence]
    hung = [end for end in hung if has_waited or end.handled or _has_left_before(end, ends)]
    hung.sort(key=lambda end: (end.handled is None, end.left_group_at is None))
    return min(left, key=lambda end: end.time, default=None) or next(iter(hung), None)


def _has_left_before(end: WorkerEnd, ends: list[WorkerEnd]) -> bool:
    """Return whether a rank that the supervisor ended had left the others before any of them left or ended."""
    others = [min(one.reported_at, one.left_at) for one in ends if one is not end]
    return end.was_stopped and end.left_group_at is not None and end.left_group_at <= min(others, default=0.0)


def _failure_text(end: WorkerEnd, failure: FailureRecord, num_ranks: int, run: Path, *, is_script: bool = False) -> str:
    if failure.is_ours:
        return failure.message + (f"\n  said by {end.name(num_ranks)}" if end.node else "")
    where = "" if not failure.step else f" after step {failure.step}"
    what = "script" if is_script else "task"
    who = end.name(num_ranks, f"the {what}")
    # no line of the message may look like the beginning of one of ours
    message = _brief(failure.message)
    text = f"{who} failed{where}: {worded(failure.type, _set_in(message))}"
    if failure.advice:
        text = f"{text.removesuffix('.')}: {failure.advice}"
    if failure.user_line is not None:
        text += f"\n  {failure.user_line}"
    if failure.user_traceback:
        text += f"\n  {_set_in(shortened(failure.user_traceback, _MOST_TRACEBACK_LINES, _MOST_COLUMNS))}"
    text += _handled(failure)
    record = run / failure_file(failure.rank)
    if message != failure.message:
        text += f"\n  the message is shortened here: {record} has more of it"
    if failure.origin == "dure":
        return f"{text}\n  this is an error in dure and not in the {what}: please report it with {record}"
    if failure.origin == "library":
        text += f"\n  in a library that dure called, at no line of the {what}; the traceback is in {record}"
    return text


def worded(kind: str, message: str) -> str:
    """Return an exception as Python's tracebacks have it: without a colon if there is no message."""
    return f"{kind}: {message}" if message else kind


def _brief(message: str) -> str:
    return shortened(message, _MOST_MESSAGE_LINES, _MOST_COLUMNS)


def _set_in(text: str) -> str:
    return text.replace("\n", "\n  ")


def in_brief(end: WorkerEnd, num_ranks: int) -> str:
    """Return one line on which rank failed, and how."""
    who = end.name(num_ranks)
    failure = end.failure
    if failure is None and end.departure is not None and end.exit_code >= 0:
        return _left(end, who).partition("\n")[0] + _place(end.departure.user_line)
    if failure is None:
        return _silent_end(end, num_ranks).partition(";")[0]
    text = failure_in_brief(failure)
    # a divergence names the diverged rank, not the one that reports it
    return text if failure.go_back_to is not None else f"{who} failed: {text}"


def failure_in_brief(failure: FailureRecord) -> str:
    """Return the first line of a failure's message, with the exception's type and its line if they say more."""
    message = _brief(failure.message.partition("\n")[0])
    if failure.is_ours or failure.go_back_to is not None:
        return message
    return f"{worded(failure.type, message)}{_place(failure.user_line)}"


def _silent_end(end: WorkerEnd, num_ranks: int, cure: str = "", *, is_script: bool = False) -> str:
    who = end.name(num_ranks)
    if end.was_stopped:
        where = "" if end.last_line is None else f"\n  {end.last_line}"
        if end.handled is not None:
            return f"{who} was still handling {end.handled} when the others had lost it; it was ended{where}"
        if end.left_group_at is not None:
            return f"{who} had left the process group when the others lost it; it was ended{where}"
        return f"{who} did not answer, and the others waited in vain; it was ended{where}"
    if end.exit_code < 0:
        number = -end.exit_code
        how = _TEXT_BY_SIGNAL.get(number, f"ended by {signal_name(number)}")
        if end.is_out_of_memory is not None:
            how = _killed_for_memory(end.memory_limit_bytes) if end.is_out_of_memory else _KILLED_BY_SOMEBODY
        line = users_frame(end.crash)
        at = "at" if end.is_at_crash else "while its main thread was at"
        where = "" if line is None else f" {at} {line}"
        return f"{who} was {how}{where}{cure and '; '}{cure}"
    if is_script:
        return _left(end, end.name(num_ranks, "the script"))
    return (
        f"{who} ended with exit code {end.exit_code} before the run was done, and said nothing: something that the "
        "task calls leaves the process (os._exit, or native code that calls exit)"
    )


def _left(end: WorkerEnd, who: str) -> str:
    """Return a sentence on the exit code with which a script exited itself, and the line if known."""
    text = f"{who} ended with exit code {end.exit_code}"
    if end.exit_code == 0:
        text += ", and the others lost it in a call that needs all"
    if end.departure is None:
        return text
    if end.departure.message:
        text += f": {_set_in(_brief(end.departure.message))}"
    line = end.departure.user_line
    where = "" if line is None else f"\n  {line}"
    return f"{text}{where}{_handled(end.departure)}"


def _handled(report: FailureRecord | Departure) -> str:
    """Return a line for each exception that a rank was handling when it failed: one may be the real reason."""
    return "".join(f"\n  while it handled {_set_in(_brief(one))}" for one in report.handled)


def _at(line: str | None) -> str:
    return "" if line is None else f" at {line}"


def _place(line: CodeLine | None) -> str:
    return "" if line is None else f" ({line.place})"


def _killed_for_memory(limit_bytes: int | None) -> str:
    fewer = "use fewer ranks, fewer loader workers or smaller microbatches"
    if limit_bytes is None:
        return f"killed (SIGKILL) by the kernel, which had run out of the host's memory: {fewer}"
    return (
        f"killed (SIGKILL) by the kernel, because the {format_bytes(limit_bytes)} of memory that its container or job "
        f"may use (the limit of its control group) were full: raise that limit, or {fewer}"
    )


def _waits(first: WorkerEnd, others: list[WorkerEnd]) -> Iterator[str]:
    """Yield what the others were waiting in for a rank that left no report."""
    for end in sorted(others, key=lambda end: end.rank):
        failure = end.failure
        if failure is not None and failure.collective and not failure.is_after_loss:
            line = failure.user_line
            where = "" if line is None else f" at {line.place} in {line.function}"
            yield f"  rank {end.rank} was in {failure.collective}{where}"
    if first.exit_code == -signal.SIGABRT and first.crash and not first.is_at_crash:
        yield (
            "  gloo aborts like this if ranks send different shapes or types, if code closes descriptors that it did "
            "not open, or if none is free (ulimit -n); torch RPC does if anything but a rank connects to its port "
            "(TP_SOCKET_IFNAME)"
        )
