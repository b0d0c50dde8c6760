"""Entry point of a rank that runs a user's script: everything is as under `torchrun`, and the script is unchanged."""

import ast
import atexit
import gc
import importlib
import multiprocessing.util
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.host.environment import LOOPBACK
from dure.launch.hangs.rank_state import collective_from
from dure.launch.scripts.main_module import exit_code_of, finish_files, run_as_main, traceback_of_main
from dure.launch.scripts.step_records import record_steps
from dure.launch.worker.child import be_a_script
from dure.process.context import Place
from dure.process.heartbeat import Heartbeats
from dure.process.jobs import ScriptJob
from dure.process.stop_signals import STOP_SIGNALS, handled_signals
from dure.terminal import print_traceback

if TYPE_CHECKING:
    from dure.failures.device_errors import AskDriver
    from dure.failures.record import FailureRecord

_kept: list[object] = []
"""Objects that the script leaves behind. A process group that is destroyed while the interpreter is alive joins its
threads with the GIL held, which gloo's threads need too (5 of 11 plain DDP scripts hung so).
"""
_closing: list[Callable[[], None]] = []
"""Functions to call at the end of the script, of modules that observe it."""
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
FACES = {"apex": "dure.compat.apex.finder", "horovod": "dure.compat.horovod.finder"}
"""Libraries whose interface dure has, with the module that lets a script import it by the library's name."""
_LOCAL_RANK_FLAGS = {"dash": "--local-rank", "underscore": "--local_rank"}


def before_fork(job: ScriptJob) -> None:
    """Do once, in the process that forks the ranks, what all of them need."""
    _import_common_parts()
    with suppress(OSError):  # no folder for temporary files; the script may never need one
        # directory of the sockets of loaders and pools: created here, this process removes it even if ranks are killed
        multiprocessing.util.get_temp_dir()


def _import_common_parts() -> None:
    from dure.torchcompat.imports import import_late_parts

    import_late_parts()
    importlib.import_module("dure.failures.report")


def main(job: ScriptJob, place: Place) -> int:
    """Run one rank's script in this process and return its exit code.

    Args:
        job: Script and its settings.
        place: Context of this rank.
    """
    if not os.isatty(0) and os.getpgrp() != os.getpid():  # torchrun and mpirun have already given it its own group
        # A terminal, or `timeout`, signals the whole group, and the supervisor forwards the same signal: once is
        # enough. And a script that signals its group should reach only its own processes.
        os.setpgrp()
    be_a_script()
    _import_common_parts()  # needed by a spawned rank; a forked one has inherited it
    os.environ.update(environment(job, place))
    _set_threads(place.threads)
    _meet(place)
    if job.face is not None:
        importlib.import_module(FACES[job.face]).install()
    pid, heartbeats, marker = os.getpid(), _heartbeats(place), list[object]()
    losses = _Losses(place.report_fd)
    _watch_collectives(losses)
    step = _count_steps(place.rank.rank, heartbeats, losses)
    close_records = None if job.records is None else record_steps(Path(job.records), job, place)
    try:
        code = _run(job, place, losses)
    except BaseException as error:
        has_own_handlers = True
        try:
            has_own_handlers = _ignore_stop_signals()
        except BaseException:  # from a handler of the script, for a signal that was just due
            _ignore_stop_signals()
        _kept.append(error)
        code = _fail_once(_told(error), place, step[0], losses, may_be_signal=has_own_handlers)
    if os.getpid() == pid:  # a process forked by the script gets here as well
        _note_end(place.rank.rank, heartbeats, step[0])
        for close in (close_records, *_closing):
            if close is not None:
                close()
    return _leave_in_order(code, marker)


def environment(job: ScriptJob, place: Place) -> dict[str, str]:
    """Return the variables that torchrun sets, and that scripts therefore read."""
    assert place.store is not None
    rank = place.rank
    # otherwise gloo, NCCL and RPC would listen on the address of the host's name; the user's settings are kept
    loopback = {} if job.num_nodes > 1 else {name: os.environ.get(name, LOOPBACK) for name in _INTERFACE_VARIABLES}
    return {
        **loopback,
        **rank.to_environment(),
        "MASTER_ADDR": place.store.host,
        "MASTER_PORT": str(place.store.port),
        "GROUP_WORLD_SIZE": str(job.num_nodes),
        "ROLE_NAME": job.role,
        "ROLE_RANK": str(rank.rank),
        "ROLE_WORLD_SIZE": str(rank.world_size),
        "TORCHELASTIC_RESTART_COUNT": str(place.round),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_RUN_ID": job.run,
        # the store is already served: see `meet_at_served_store`
        "TORCHELASTIC_USE_AGENT_STORE": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(place.threads)),
    }


def _ignore_stop_signals() -> bool:
    """Ignore stop signals from now on: this rank ends anyway, and an exception in a handler would lose its report.

    Returns:
        True if the script had handlers of its own, which may have raised.
    """
    has_own = _has_own_handlers()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    return has_own


def _has_own_handlers() -> bool:
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    return any(callable(handler) and handler is not signal.default_int_handler for handler in handlers)


def _set_threads(threads: int) -> None:
    """Set the number of threads as OMP_NUM_THREADS would have done before torch was imported."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]) if os.environ["OMP_NUM_THREADS"].isdecimal() else threads)


def _meet(place: Place) -> None:
    from dure.torchcompat.stores import meet_at_served_store

    assert place.store is not None
    meet_at_served_store(place.store.host, place.store.port)


def _heartbeats(place: Place) -> Heartbeats | None:
    """Map the heartbeat memory, once: the script may close the descriptor."""
    return None if place.heartbeat_fd is None else Heartbeats(place.heartbeat_fd, place.rank.world_size)


class _Losses:
    """Losses of other ranks that collectives of the script have reported, which it may not tell when it fails later."""

    def __init__(self, report_fd: int | None) -> None:
        self._report_fd = report_fd
        self._pid = os.getpid()
        self._before: list[set[int]] = []
        """Identities of the errors that were being handled at each loss. They came first, and are no consequence."""
        self._calls = -1
        """Number of calls, including the one that failed last."""
        self._is_over = False
        self.has_timed_out = False
        """True if one of them is that a rank did not answer in time."""

    def note(self, error: BaseException) -> None:
        """Note an error of a collective if it reports a lost rank."""
        from dure.failures.report import contexts, is_due_to_lost_peer, is_due_to_timeout, leave_loss
        from dure.torchcompat.stores import calls_made_in_last_group

        if os.getpid() == self._pid and not self._is_over and is_due_to_lost_peer(error):
            self._before.append({id(one) for one in contexts(error)})
            self._calls = calls_made_in_last_group()
            self.has_timed_out = self.has_timed_out or is_due_to_timeout(error)
            leave_loss(error, self._report_fd)

    def overcome(self) -> None:
        """Forget the losses: the script goes on in spite of them."""
        if self._before and os.getpid() == self._pid and not self._is_over:
            from dure.failures.report import withdraw_report

            self._before.clear()
            self.has_timed_out = False
            withdraw_report(self._report_fd)

    def explain(self, error: BaseException) -> bool:
        """Return whether an error with which the script ends may be a consequence of a loss.

        It is none if later calls have succeeded: a barrier of another group may time out, and training go on.
        Threads that go on change no report from now on.
        """
        self._is_over = True
        if not self._before:
            return False
        from dure.torchcompat.stores import calls_made_in_last_group

        if calls_made_in_last_group() > self._calls >= 0:
            return False
        return any(id(error) not in before for before in self._before)


def _watch_collectives(losses: _Losses) -> None:
    from dure.torchcompat.calls import watch_failed_calls

    watch_failed_calls(losses.note)


def _count_steps(rank: int, heartbeats: Heartbeats | None, losses: _Losses) -> list[int]:
    """Make every optimiser step a heartbeat, and the proof that losses are overcome; return the live count of steps."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from dure.torchcompat.calls import SequenceNumber

    count = [0]
    if heartbeats is None:
        return count
    sequence = SequenceNumber()
    heartbeats.beat(rank, 0, "starting")

    def beat(*_: Any) -> None:
        count[0] += 1
        losses.overcome()
        heartbeats.beat(rank, count[0], sequence=sequence.now())

    register_optimizer_step_post_hook(beat)
    return count


def _note_end(rank: int, heartbeats: Heartbeats | None, step: int) -> None:
    if heartbeats is not None:
        from dure.torchcompat.calls import SequenceNumber

        heartbeats.beat(rank, step, "leaving", SequenceNumber().now())


def _run(job: ScriptJob, place: Place, losses: _Losses) -> int:
    arguments = [*job.arguments]
    argument = job.local_rank_argument
    flag = _LOCAL_RANK_FLAGS.get(argument)
    if argument == "auto" and not job.is_module:
        flag = local_rank_flag(Path(job.script))
    if flag is not None:
        arguments.insert(0, f"{flag}={place.rank.local_rank}")
    if argument == "apex":
        arguments += ["--world-size", str(place.rank.world_size), "--rank", str(place.rank.rank)]
    _be_as_python_begins()
    if job.observer is not None:
        module, given = job.observer
        _closing.append(importlib.import_module(module).begin(given, place))
    sys.argv[1:] = arguments
    # a script that starts itself again by these words must not start all ranks again
    sys.orig_argv[:] = [sys.executable, *(["-m"] if job.is_module else []), job.script, *arguments]
    try:
        run_as_main(job.script, is_module=job.is_module)
    except SystemExit as leave:
        from dure.failures.report import leave_departure

        _kept.append(leave)
        has_lost_peer = losses.explain(leave)
        leave_departure(
            leave,
            place.report_fd,
            may_follow_signal=_has_own_handlers(),
            has_lost_peer=has_lost_peer,
            has_timed_out=has_lost_peer and losses.has_timed_out,
        )
        return exit_code_of(leave)
    return 0


def _be_as_python_begins() -> None:
    """Restore the state of a fresh interpreter that a fork, or a command of dure, has changed."""
    for number in handled_signals():
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # forks of one process would all draw the same numbers; Python's own generator handles that itself
    import torch

    torch.seed()
    if "numpy" in sys.modules:
        import numpy

        numpy.random.seed()


def local_rank_flag(script: Path) -> str | None:
    """Return the flag for the local rank in a script written for the old launcher, or None.

    `torch.distributed.launch` passed it as an argument; such a script's parser does not read the environment.
    """
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            if found := next((flag for flag in _LOCAL_RANK_FLAGS.values() if flag in names), None):
                return found
    return None


def _told(error: BaseException) -> BaseException:
    from dure.failures.report import told

    return told(error)


def _fail_once(error: BaseException, place: Place, step: int, losses: _Losses, *, may_be_signal: bool) -> int:
    from dure.failures.report import report_undisturbed

    has_lost_peer = losses.explain(error)

    def report() -> int:
        return _fail(error, place, step, losses if has_lost_peer else None, may_be_signal=may_be_signal)

    try:
        return report_undisturbed(report)
    except RuntimeError:  # raised by the handler that `report_undisturbed` disables, just before it was disabled
        return report_undisturbed(report)


def _fail(error: BaseException, place: Place, step: int, losses: _Losses | None, *, may_be_signal: bool) -> int:
    """Print the traceback as Python would, and write a report for the verdict over all ranks.

    Args:
        error: Exception that ended the script.
        place: Context of this rank.
        step: Last completed step.
        losses: Losses of which it may be a consequence; None if there are none.
        may_be_signal: True if a handler of the script may have raised it.
    """
    from dure.failures.report import describe_failure, for_script, is_interrupted, write_failure_report

    error.__traceback__ = traceback_of_main(error)
    code = 130 if is_interrupted(error, may_be_signal=may_be_signal) else 1
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as leave:
        code = exit_code_of(leave)
    except BaseException as fault:
        fault.__traceback__, fault.__context__ = traceback_of_main(fault), None
        print_traceback("Error in sys.excepthook:")
        sys.__excepthook__(type(fault), fault, fault.__traceback__)
        print_traceback("\nOriginal exception was:")
        sys.__excepthook__(type(error), error, error.__traceback__)
    with suppress(Exception):  # the script has closed or removed it
        sys.stderr.flush()
    collective = _collective()

    def describe(ask_driver: "AskDriver | None") -> "FailureRecord":
        failure = for_script(describe_failure(error, place.rank.rank, step, ask_driver=ask_driver))
        return replace(
            failure,
            user_traceback=None,
            collective=collective,
            is_consequence=failure.is_consequence or losses is not None,
            is_after_loss=losses is not None and not failure.is_consequence,
            has_timed_out=failure.has_timed_out or (losses is not None and losses.has_timed_out),
        )

    write_failure_report(describe, place.report_fd)
    return code


def _collective() -> str | None:
    """Return the name of the collective in which this rank is, or was when it failed."""
    from dure.torchcompat.calls import flight_record

    try:
        calls = [collective_from(entry) for entry in flight_record()]
    except RuntimeError:  # the state of the group does not permit it
        return None
    return next((str(call) for call in calls if call.is_pending), str(calls[-1]) if calls else None)


def _leave_in_order(code: int, marker: list[object]) -> int:
    """Perform the interpreter's shutdown up to the point at which torch's threads abort; the rest is left out."""
    atexit.unregister(gc.freeze)  # registered by the command that forked this rank
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # threads, and pools that were not shut down
        atexit._run_exitfuncs()
    except BaseException:
        print_traceback(traceback.format_exc())
        code = code or 1
    finish_files(marker)
    return code
