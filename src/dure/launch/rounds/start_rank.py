"""Start of a worker process, by fork or by spawn."""

import errno
import importlib
import json
import os
import resource
import socket
import subprocess
import sys
import warnings
from dataclasses import asdict, replace

from dure.cluster.rank import RankInfo
from dure.errors import EnvironmentLacks
from dure.launch.rounds.request import Launch, StoreSocket
from dure.launch.rounds.surviving_memory import SurvivingMemory
from dure.launch.worker.child import Output, run_in_child
from dure.launch.worker.questions import Questions
from dure.launch.worker.worker_process import Worker, unnamed_file
from dure.process.context import Place, StoreAddress
from dure.process.jobs import job_to_json

_FILES_PER_RANK, _FILES_TO_MEET = 4, 6
"""Numbers of open files, from measurements: those that a rank costs its launcher and the ranks after it, or as a peer,
and those that it opens itself until it has met the others.
"""


def check_open_files(num_ranks: int) -> None:
    """Refuse to start ranks that would have no descriptor left to meet the others: torch would retry for half an hour.

    Raises:
        EnvironmentLacks: The limit on open files is too low.
    """
    try:
        num_open = len(os.listdir("/proc/self/fd")) - 1  # without that of the listing
    except FileNotFoundError:  # not Linux
        return
    except OSError as error:
        raise cannot_start("the ranks", error) from error
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = num_open + _FILES_PER_RANK * num_ranks + _FILES_TO_MEET
    if resource.RLIM_INFINITY != limit < needed:
        raise EnvironmentLacks(
            f"the ranks could not be started: they need about {needed} open files, and {limit} are allowed; use a "
            "smaller --nproc, or raise the limit on open files (ulimit -n)"
        )


def start_worker(
    launch: Launch,
    rank: int,
    output: Output,
    store: StoreSocket,
    memory: SurvivingMemory,
    *,
    round_number: int,
    by_fork: bool,
) -> Worker:
    """Start one rank; stop signals must be blocked meanwhile, and the new process unblocks them when it is ready.

    Args:
        launch: Request with the entry to start.
        rank: Rank to start.
        output: Output destination of the rank.
        store: Address of the store, which rank 0 serves unless another process does.
        memory: Memory that outlives the ranks of a round.
        round_number: Number of earlier starts of the ranks.
        by_fork: Fork; otherwise start a fresh interpreter.

    Raises:
        EnvironmentLacks: The system cannot start another process.
    """
    report_fd, stacks_fd = unnamed_file(f"dure-rank{rank}"), unnamed_file(f"dure-stacks{rank}")
    questions, answers = socket.socketpair()
    place = replace(
        _place(launch, rank, store, report_fd, round_number),
        heartbeat_fd=memory.heartbeat_fd,
        snapshot_fds=memory.snapshot_fds,
        stacks_fd=stacks_fd,
        questions_fd=answers.fileno(),
        has_live_line=output.has_live_line,
    )
    try:
        start = _fork if by_fork else _spawn
        pid, process = start(launch, place, output, store.listener)
    except OSError as error:
        os.close(report_fd)
        os.close(stacks_fd)
        questions.close()
        raise cannot_start(f"rank {rank} of {launch.nodes.world_size}", error) from error
    finally:
        answers.close()
    return Worker(
        rank=rank,
        pid=pid,
        report_fd=report_fd,
        stacks_fd=stacks_fd,
        questions=Questions(questions),
        process=process,
        pidfd=_pidfd(pid),
        is_expendable=rank in launch.expendable,
        keeps_terminal=output.is_terminal,
        has_begun=lambda: memory.heartbeats.last(rank).step >= 0,
    )


def cannot_start(what: str, error: OSError) -> EnvironmentLacks:
    """Return the error for a limit of the system that was reached."""
    limit = "open files (ulimit -n)" if error.errno == errno.EMFILE else "processes (ulimit -u)"
    return EnvironmentLacks(
        f"{what} could not be started: {error.strerror}; use a smaller --nproc, or raise the limit on {limit}"
    )


def _place(launch: Launch, rank: int, store: StoreSocket, report_fd: int, round_number: int) -> Place:
    nodes = launch.nodes
    serves = rank == 0 and not launch.serves_store and store.listener is not None
    return Place(
        rank=RankInfo(
            rank=rank,
            local_rank=rank - nodes.first_rank,
            node_rank=nodes.me.node_rank,
            world_size=nodes.world_size,
            local_world_size=nodes.me.num_ranks,
        ),
        store=StoreAddress(
            host=store.host,
            port=store.port,
            prefix=f"{launch.store_prefix}/{round_number}",
            listen_fd=store.listener.fileno() if serves and store.listener is not None else None,
        ),
        interface=nodes.interface,
        is_on_several_hosts=not nodes.is_alone,
        term=None if nodes.lease is None else nodes.lease.term,
        threads=launch.threads,
        is_supervised=True,
        report_fd=report_fd,
        round=round_number,
        orders=launch.orders,
    )


_Started = tuple[int, "subprocess.Popen[bytes] | None"]
"""Process id, and Python's handle of a spawned process."""


def _fork(launch: Launch, place: Place, output: Output, listener: socket.socket | None) -> _Started:
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, even NumPy's, which survive a fork; `reason_not_to_fork` has checked in detail
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid, None
    if listener is not None and place.store is not None and place.store.listen_fd is not None:
        listener.detach()
    elif listener is not None:
        listener.close()

    def entry(place: Place) -> int:
        if launch.logs is not None:
            launch.logs.leave()
        return int(importlib.import_module(launch.entry).main(launch.job, place))

    run_in_child(entry, place, output, parent)
    raise AssertionError("a child does not return")


def _spawn(launch: Launch, place: Place, output: Output, listener: socket.socket | None) -> _Started:
    arguments = {
        "entry": launch.entry,
        "job": job_to_json(launch.job),
        "place": asdict(place),
        "output": asdict(output),
        "parent_pid": os.getpid(),
    }
    own = place.report_fd, place.stacks_fd, place.questions_fd, place.heartbeat_fd, *place.snapshot_fds
    fds = [fd for fd in (*own, *(output.descriptors or ())) if fd is not None]
    if place.store is not None and place.store.listen_fd is not None:
        fds.append(place.store.listen_fd)
    # -W, -X, -O and the like, as multiprocessing passes them on
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    command = [sys.executable, *flags, "-m", "dure.launch.worker.spawn_entry", json.dumps(arguments)]
    process = subprocess.Popen(command, pass_fds=fds, stdin=None if output.is_terminal else subprocess.DEVNULL)
    return process.pid, process


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
