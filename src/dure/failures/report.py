"""Failure report of a rank, for the verdict over all ranks."""

import errno
import json
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any, Literal

import torch

from dure.errors import (
    DiskFull,
    DureError,
    EnvironmentLacks,
    Misuse,
    PeerLost,
    ReplicasDiverged,
    TaskInvalid,
    message_of,
)
from dure.failures.device_errors import AskDriver, DeviceError, device_error
from dure.failures.frames import (
    OWN_ROOT,
    format_error,
    frames_of,
    is_foreign,
    is_of_engine,
    is_raise,
    own_file,
    shown_name,
    traceback_in_user_code,
    users_first,
)
from dure.failures.record import CodeLine, Departure, FailureRecord, failure_to_json, mentions_timeout
from dure.failures.tellable import tellable
from dure.host.gpu_health import gpu_health
from dure.process.context import DEPARTURE
from dure.process.own_descriptors import usable
from dure.torchcompat.imports import library_for_another_torch
from dure.torchcompat.stores import left_group_at

_PEER_LOST_WORDS = (
    "connection closed by peer",
    "connection closed by remote peer",  # NCCL's sockets
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "remote process exited",
    "nccl communicator was aborted",
    "collective operation timeout",
    "socket closed",
    "failed to recv",
    "recvvalue failed",
    "application timeout",
    "wait timeout",
    "connect timeout",
    "processgroup not initialized",
    "originated at tensorpipe",
    "peerlost: ",  # ours, after it has passed through torch's C++, for example by DDP's communication hooks
)
_LOADER = "torch/utils/data/dataloader.py"
_FROM_LOADER = re.compile(r"Caught .+ in (DataLoader worker process|pin memory thread) .+\.\n *Original ")
_FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n(?: {4,}(?P<text>\S.*))?', re.M)
_OTHER_ROOM = "--precision bf16, a strategy that divides the model (fsdp, pipeline), or a device with more memory"
_EVALUATION = own_file("dure.training.session.evaluation")
_BACKWARD = own_file("dure.torchcompat.gradients")
_OUT_OF_MEMORY = (
    "out of memory",
    "DefaultCPUAllocator: can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
"""Texts by which torch's allocators and CUDA's libraries report exhausted memory in a plain RuntimeError."""
_NO_FILE_LEFT = os.strerror(errno.EMFILE)
"""Text by which native code, as gloo's, reports in a plain RuntimeError that no descriptor is left."""
_NO_FILE_ADVICE = (
    "raise the limit on open files (ulimit -n), or have fewer open at a time: each process group, loader process and "
    "peer needs some"
)
_NO_GRADIENT = "does not require grad and does not have a grad_fn"
_MOST_TEXT = 2**16
"""Maximum characters of a message or a traceback: the record must fit where the supervisor reads it."""
_MOST_HANDLED, _MOST_BEFORE = 3, 100
"""Maximum number of reported exceptions that were being handled when another was raised, and of those that are searched
for the first ones, which say most.
"""
_MOST_BRIEF = 500
"""Maximum characters of a message that is shown in one line."""
_GRADIENT_ADVICE = (
    "an evaluation computes without gradients: let what needs them in the loss compute under torch.enable_grad()"
)
_BACKWARD_ADVICE = "dure calls backward: let the loss compute and return its value alone"
_SECOND_BACKWARD = "Trying to backward through the graph a second time"
_LOADER_ADVICE = "often the host's memory or /dev/shm ran out; use fewer --num-workers"
_NO_SHARED_MEMORY = "unable to allocate shared memory"
_SHARED_MEMORY_FULL = (
    "there is no space left in /dev/shm, through which loader processes hand over their batches: free some, give the "
    "container more (--shm-size=8g or --ipc=host), or use --num-workers 0"
)

_WORDS_FOR_SCRIPTS = {
    "a smaller --microbatch-size (the result stays the same), --precision bf16,": "smaller batches, less precision,",
    "--num-workers 0": "no loader processes",
    "--num-workers": "loader processes",
}
"""Settings of `dure train` in cures, and what a script has in place of them."""


def describe_failure(
    error: BaseException,
    rank: int,
    step: int | None,
    microbatch_size: int | None = None,
    gpus: Sequence[int] = (),
    ask_driver: AskDriver | None = None,
) -> FailureRecord:
    """Return the record of a failure, with its location in the user's code and whether it is only a consequence.

    Args:
        error: Exception.
        rank: Rank that raised it.
        step: Last completed step; None before training.
        microbatch_size: Samples that a device computed at once in the failed step; None if it failed elsewhere.
        gpus: CUDA indices of the rank's GPUs.
        ask_driver: Queries the driver about a GPU that may have failed; None to skip that.
    """
    error = _named(error)
    is_ours = isinstance(error, DureError)
    is_out_of_memory = not is_ours and _is_out_of_memory(error)
    is_lost_peer = is_due_to_lost_peer(error) and not _is_loader_lost(error)
    kind, message, advice = _worded(error)
    has_other_cause = is_ours or is_lost_peer or is_out_of_memory or _FROM_LOADER.match(message_of(error)) is not None
    device = None if has_other_cause else device_error(error, gpus, ask_driver)
    if is_out_of_memory:
        message, advice = _out_of_memory_worded(error, message, microbatch_size)
    elif device is not None:
        message, advice = device.message, device.advice
    line = user_line(error)
    if line is None:  # there will be no traceback, under which the notes would appear
        message = "\n".join([message, *getattr(error, "__notes__", ())])
    shown = None if is_ours else _shown_traceback(error, device, has_user_line=line is not None)
    # exhausted memory, or a failed device, is not an error of the code that used it
    is_of_machine = is_out_of_memory or (device is not None and device.is_of_hardware)
    return FailureRecord(
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        time=time.time(),
        step=step,
        type=kind[:_MOST_BRIEF],
        message=_shortened(message),
        advice=advice,
        exit_code=error.exit_code if isinstance(error, DureError) else 1,
        is_ours=is_ours,
        is_misuse=isinstance(error, Misuse),
        is_consequence=is_lost_peer or (device is not None and device.is_consequence),
        has_timed_out=is_lost_peer and is_due_to_timeout(error),
        may_be_gpu=device is not None and device.may_be_gpu,
        is_gpu_lost=device is not None and device.is_lost,
        origin="task" if line or hasattr(error, "is_planned") or is_of_machine else _origin(error),
        microbatch_size=microbatch_size if is_out_of_memory else None,
        go_back_to=error.go_back_to if isinstance(error, ReplicasDiverged) else None,
        user_line=line,
        user_traceback=None if shown is None else _shortened(shown),
        traceback=_shortened(format_error(error)),
        handled=_handled_before(error),
        left_group_at=left_group_at(),
    )


def told(error: BaseException) -> BaseException:
    """Return an exception, or one in its place if code of its class fails or takes long when it is asked."""
    return tellable(error, lambda one: describe_failure(one, 0, None))


def _shortened(text: str) -> str:
    """Shorten a text by omitting its middle."""
    left_out, half = len(text) - _MOST_TEXT, _MOST_TEXT // 2
    return text if left_out <= 0 else f"{text[:half]}\n… {left_out:,} characters are left out …\n{text[-half:]}"


def write_failure_report(describe: Callable[[AskDriver | None], FailureRecord], report_fd: int | None) -> FailureRecord:
    """Write the failure report of this process, and a second time with the driver's information on its GPU.

    The first report is without it: when a GPU fails, NCCL's watchdog may abort the process at any moment.

    Args:
        describe: Returns the record of the failure, with the driver's information if it is given a function to query
            it.
        report_fd: Descriptor of the report to the supervisor; None if there is no supervisor.
    """
    failure = describe(None)
    write_failure(failure, report_fd)
    if failure.may_be_gpu:
        failure = replace(describe(gpu_health), time=failure.time)
        write_failure(failure, report_fd)
    return failure


def write_failure(failure: FailureRecord, report_fd: int | None) -> None:
    """Write a failure to the supervisor's report; do nothing without a supervisor."""
    _write_report(report_fd, failure_to_json(failure))


def for_script(failure: FailureRecord) -> FailureRecord:
    """Return the failure of a script, whose cure names no setting of `dure train`."""
    message, advice = failure.message, failure.advice
    for setting, words in _WORDS_FOR_SCRIPTS.items():
        message = message.replace(setting, words) if failure.is_ours else message
        advice = None if advice is None else advice.replace(setting, words)
    return replace(failure, message=message, advice=advice)


def leave_departure(
    leave: SystemExit,
    report_fd: int | None,
    *,
    may_follow_signal: bool = True,
    has_lost_peer: bool = False,
    has_timed_out: bool = False,
) -> None:
    """Record where a script calls `sys.exit`, because others may still be in a call that needs this rank.

    Args:
        leave: Exception of `sys.exit`.
        report_fd: Descriptor of the report to the supervisor; None if there is no supervisor.
        may_follow_signal: True if a handler of the script may have called it.
        has_lost_peer: True if a collective of the script has reported the loss of another rank before.
        has_timed_out: True if it had waited for that rank in vain.
    """
    may_follow_signal = may_follow_signal or any(isinstance(error, KeyboardInterrupt) for error in contexts(leave))
    message = None if leave.code is None or isinstance(leave.code, int) else _shortened(str(leave.code))
    departure = Departure(
        message=message,
        user_line=user_line(leave),
        may_follow_signal=may_follow_signal,
        is_consequence=has_lost_peer or is_due_to_lost_peer(leave),
        has_timed_out=has_timed_out or is_due_to_timeout(leave),
        time=time.time(),
        handled=_handled_before(leave),
        left_group_at=left_group_at(),
    )
    _write_report(report_fd, {DEPARTURE: asdict(departure)})


def leave_loss(error: BaseException, report_fd: int | None) -> None:
    """Record that a script has lost another rank, because it may exit without a report (`os._exit`)."""
    line = user_line(error)
    loss = Departure(
        message=None,
        user_line=line,
        may_follow_signal=True,
        is_consequence=True,
        has_timed_out=is_due_to_timeout(error),
        time=time.time(),
    )
    _write_report(report_fd, {DEPARTURE: asdict(loss)})


def withdraw_report(report_fd: int | None) -> None:
    """Remove what this process has reported to the supervisor: the script has overcome it."""
    descriptor = None if report_fd is None else usable(report_fd)
    if descriptor is not None:
        os.ftruncate(descriptor, 0)


def contexts(error: BaseException) -> list[BaseException]:
    """Return the exceptions that were being handled when an exception was raised, the last first."""
    chain: list[BaseException] = []
    before = error.__context__
    while before is not None and all(before is not one for one in chain):
        chain.append(before)
        before = before.__context__
    return chain


def _write_report(report_fd: int | None, record: Mapping[str, Any]) -> None:
    descriptor = None if report_fd is None else usable(report_fd)
    if descriptor is not None:
        # a single call that overwrites all earlier contents: blanks after a record are harmless
        os.pwrite(descriptor, json.dumps(record).encode().ljust(os.fstat(descriptor).st_size), 0)


def handled_in_brief(error: BaseException) -> str | None:
    """Return an exception that a rank is handling, with its line; None if it only reports the loss of another rank."""
    line = user_line(error)
    if line is None or is_due_to_lost_peer(error):
        return None
    kind, message, _ = _worded(error)
    first = message.partition("\n")[0][:_MOST_BRIEF]
    return f"{kind}{first and ': '}{first} ({line.place})"


def _handled_before(error: BaseException) -> tuple[str, ...]:
    """Return the exceptions from which an exception was raised, or that were being handled then, the last first.

    Those that its code hides (`from None`) are left out, and so are reports of lost ranks.
    """

    def before_of(one: BaseException) -> BaseException | None:
        return one.__cause__ or (None if one.__suppress_context__ else one.__context__)

    before = list(islice(_chain(error, before_of), 1, _MOST_BEFORE))
    briefs = (brief for one in reversed(before) if (brief := handled_in_brief(one)) is not None)
    return tuple(islice(briefs, _MOST_HANDLED))[::-1]


def is_peer_lost(error: BaseException) -> bool:
    """Return whether an exception, or the one that it was raised from, only reports the loss of another rank."""
    return _holds_lost_peer(error, lambda one: one.__cause__)


def is_due_to_lost_peer(error: BaseException) -> bool:
    """Return whether an exception reports the loss of another rank, or was raised while code dealt with that loss."""
    return _holds_lost_peer(error, lambda one: one.__cause__ or one.__context__)


def is_due_to_timeout(error: BaseException) -> bool:
    """Return whether an exception, or one before it, reports that another rank did not answer in time."""
    before = _chain(error, lambda one: one.__cause__ or one.__context__)
    return any(_reports_peer(one) and mentions_timeout(message_of(one)) for one in before)


def _holds_lost_peer(
    error: BaseException,
    before_of: Callable[[BaseException], BaseException | None],
    groups: tuple[BaseException, ...] = (),
) -> bool:
    """Return whether an exception or one before it reports a lost rank; a group does if all its members do.

    Args:
        error: Exception.
        before_of: Returns the exception before one.
        groups: Groups that it is a member of, one of which it may have been raised from.
    """
    return any(
        _reports_peer(one)
        or (
            isinstance(one, BaseExceptionGroup)
            and all(one is not group for group in groups)
            and all(_holds_lost_peer(member, before_of, (*groups, one)) for member in one.exceptions)
        )
        for one in _chain(error, before_of)
    )


def _chain(error: BaseException, before_of: Callable[[BaseException], BaseException | None]) -> Iterator[BaseException]:
    """Yield an exception and those before it, up to the loss of a loader, whose queue may have lost a connection."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and all(found is not one for one in seen):
        yield found
        seen.append(found)
        found = before_of(found)
        if found is not None and _is_loader_lost(found):
            return


def _reports_peer(error: BaseException) -> bool:
    """Return whether an exception is that of a lost rank.

    Other services have such messages too: what the task's code raises itself, or its own sockets, reports no rank.
    """
    if isinstance(error, PeerLost):
        return True
    if isinstance(error, ConnectionError):
        is_of_ranks = user_line(error) is None and _is_raised_between_ranks(error)
    else:
        is_of_ranks = isinstance(error, RuntimeError) and not _is_raised_by_user(error)
    return is_of_ranks and any(words in message_of(error).lower() for words in _PEER_LOST_WORDS)


def _is_raised_between_ranks(error: BaseException) -> bool:
    """Return whether an exception passed through torch or dure: Python's own modules use sockets of other services."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(file.startswith(OWN_ROOT) or is_of_engine(file) for file in files)


def _is_raised_by_user(error: BaseException) -> bool:
    """Return whether a line of the task, or of a library other than torch, raised an exception by its own statement."""
    frames = frames_of(error)
    return bool(frames) and is_foreign(frames[-1].filename) and is_raise(frames[-1])


def is_interrupted(error: BaseException, *, may_be_signal: bool) -> bool:
    """Return whether a signal interrupted a script, rather than a `KeyboardInterrupt` raised by its own code.

    Args:
        error: Exception that ended the script.
        may_be_signal: True if code of the script that raises it may be a signal's handler.
    """
    before = error.__context__
    is_own = not may_be_signal and _is_raised_by_user(error) and not isinstance(before, KeyboardInterrupt)
    return isinstance(error, KeyboardInterrupt) and not is_own


def report_undisturbed(report: Callable[[], int]) -> int:
    """Write the failure report of this process, even if another error interrupts it.

    The death of a loader is reported to a rank twice: by its queue, and by torch's signal handler, which raises
    anywhere.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGCHLD,))
    try:
        return report()
    except RuntimeError:
        return report()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _named(error: BaseException) -> BaseException:
    """Replace an error that dure itself met while writing records or loading samples by one of its own classes."""
    if DiskFull.is_reported_by(error) and user_line(error) is None:
        named = (
            EnvironmentLacks(_SHARED_MEMORY_FULL)
            if _is_in_loader(error)
            else DiskFull(f"the disk is full while records are written: {DiskFull.CURE}")
        )
        return named.with_traceback(error.__traceback__)
    if _has_no_file_left(error) and user_line(error) is None:
        few = EnvironmentLacks(f"this process has as many files open as it may: {_NO_FILE_ADVICE}")
        return few.with_traceback(error.__traceback__)
    if isinstance(error, OSError) and error.errno == errno.EBADF and _is_in_dure(error):
        closed = TaskInvalid(
            f"a file that dure had open is closed ({error}): where the task or a library closes descriptors by their "
            "numbers, let it close only those that it opened"
        )
        return closed.with_traceback(error.__traceback__)
    return error


def _is_in_dure(error: BaseException) -> bool:
    return user_line(error) is None and _origin(error) == "dure"


def _worded(error: BaseException) -> tuple[str, str, str | None]:
    """Return the exception's type, its message, and a cure if one is known."""
    kind, message = type(error).__name__, message_of(error)
    if isinstance(error, SystemExit):
        return kind, f"the task's code called sys.exit({error.code!r})", "raise an exception instead"
    if _is_loader_lost(error):
        return kind, f"a loader process was killed or crashed ({message.strip()})", _LOADER_ADVICE
    if _FROM_LOADER.match(message):
        return kind, _message_of_loader(message), _SHARED_MEMORY_FULL if _NO_SHARED_MEMORY in message else None
    if (misfit := library_for_another_torch(error)) is not None:
        return kind, misfit, None
    if (member := _main_member(error)) is not None:
        member_kind, text, advice = _worded(member)
        return kind, f"{message}: {member_kind}{text and ': '}{text}", advice
    if _has_no_file_left(error):
        return kind, message, _NO_FILE_ADVICE
    if _NO_GRADIENT in message and _is_in_evaluation(error):
        return kind, message, _BACKWARD_ADVICE if _calls_backward(error) else _GRADIENT_ADVICE
    if message.startswith(_SECOND_BACKWARD) and any(frame.filename == _BACKWARD for frame in frames_of(error)):
        return kind, message, f"if the loss calls backward itself: {_BACKWARD_ADVICE}"
    return kind, message, None


def _main_member(error: BaseException) -> BaseException | None:
    """Return the member of an exception group that says most: the first that does not only report a lost rank."""
    if not isinstance(error, BaseExceptionGroup):
        return None
    return next((member for member in error.exceptions if not is_due_to_lost_peer(member)), error.exceptions[0])


def _is_in_evaluation(error: BaseException) -> bool:
    return any(frame.filename == _EVALUATION for frame in frames_of(error))


def _calls_backward(error: BaseException) -> bool:
    """Return whether a method `backward` of a tensor raised an exception, which dure itself does not call."""
    return any(frame.name == "backward" and frame.filename.endswith("torch/_tensor.py") for frame in frames_of(error))


def _has_no_file_left(error: BaseException) -> bool:
    """Return whether this process has reached the limit on open files."""
    if isinstance(error, OSError):
        return error.errno == errno.EMFILE
    return isinstance(error, RuntimeError) and _NO_FILE_LEFT in message_of(error)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in message_of(error) for words in _OUT_OF_MEMORY)


def _out_of_memory_worded(error: BaseException, message: str, microbatch_size: int | None) -> tuple[str, str]:
    """Return the exception's message, without the allocator's advice, and a cure."""
    text = message.partition(" Of the allocated memory")[0] or "out of memory"
    if _is_in_evaluation(error):
        return text, f"use a smaller --eval-batch-size, {_OTHER_ROOM}"
    if microbatch_size == 1:
        return text, f"one sample at a time is too much for this device: use {_OTHER_ROOM}"
    fewer = (
        "a smaller --microbatch-size" if microbatch_size is None else f"--microbatch-size {-(-microbatch_size // 2)}"
    )
    return text, f"use {fewer} (the result stays the same), --precision bf16, or more devices"


def _is_loader_lost(error: BaseException) -> bool:
    """Return whether a loader process died: torch may notice it, or the rank cannot open a batch's memory."""
    if isinstance(error, RuntimeError):
        return message_of(error).startswith("DataLoader worker (pid")
    return isinstance(error, OSError | EOFError) and _is_in_loader(error)


def _is_in_loader(error: BaseException) -> bool:
    """Return whether torch's loader raised an exception in this process, and not a sample that it read."""
    files = [frame.filename for frame in frames_of(error)]
    loader = next((file for file in reversed(files) if is_foreign(file) or _LOADER in file), "")
    return _LOADER in loader


def _message_of_loader(message: str) -> str:
    """Return the message of an exception from a loader process, without the traceback that torch adds around it."""
    frames = list(_FRAME.finditer(message))
    after = message[frames[-1].end() :] if frames else message
    lines = [line for line in after.splitlines() if line and not line.startswith(" ")]
    where = re.search(r"DataLoader worker process (\d+)", message)
    first, *rest = lines or [message]  # notes, such as the index of the sample, are on separate lines
    text = first.partition(": ")[2] or first
    return "\n".join([f"{text} (in loader process {where[1]})" if where else text, *rest])


def user_line(error: BaseException) -> CodeLine | None:
    """Return the innermost line of the task's code in the exception's traceback; None if there is none.

    For a group of exceptions it is that of a member: the group itself is raised where all of them are collected.
    """
    member = _main_member(error)
    if member is not None and (line := user_line(member)) is not None:
        return line
    message = message_of(error)
    if _FROM_LOADER.match(message):
        frames = [
            traceback.FrameSummary(m["file"], int(m["line"]), m["function"], line=m["text"])
            for m in _FRAME.finditer(message)
        ]
    else:
        frames = [*frames_of(error), *_unreadable_line(error)]
    chosen = users_first([frame.filename for frame in frames])
    if not chosen:
        return None
    last = frames[chosen[-1]]
    # code that was generated, and the line of a syntax error, may be of any length
    text = None if last.line is None else last.line[:_MOST_BRIEF]
    return CodeLine(file=shown_name(last.filename), line=last.lineno, function=last.name[:_MOST_BRIEF], text=text)


def _unreadable_line(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the line of a syntax error, which never ran and so is not in the traceback."""
    if not isinstance(error, SyntaxError) or not isinstance(error.filename, str):
        return []
    return [traceback.FrameSummary(error.filename, error.lineno, "<module>", line=error.text)]


def _origin(error: BaseException) -> Literal["library", "dure"]:
    """Return the owner, `dure` or `library`, of an exception that no line of the task is involved in.

    Native code leaves no frame: an error of torch's (a RuntimeError) seems to come from the line that called it. The
    death of a loader process is torch's, too, where dure raises it later than torch's signal handler.
    """
    if _is_loader_lost(error):
        return "library"
    frames = frames_of(error)
    if not frames or not frames[-1].filename.startswith(OWN_ROOT):
        return "library" if frames else "dure"
    is_native = isinstance(error, RuntimeError) and not is_raise(frames[-1])
    return "library" if is_native else "dure"


def _shown_traceback(error: BaseException, device: DeviceError | None, *, has_user_line: bool) -> str | None:
    """Return the traceback through the task's code; None if it is a single line."""
    if not has_user_line or _FROM_LOADER.match(message_of(error)) is not None or isinstance(error, SystemExit):
        return None
    shown = traceback_in_user_code(error)
    return shown if device is None else shown.replace(message_of(error).strip(), device.plain_text)
