"""Probe of all ranks during a hang: their Python stacks, their collectives, and their state in the system."""

import ctypes
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from dure.failures.verdict import failure_in_brief
from dure.launch.hangs.rank_state import Call, RankState, collective_from, frames_from
from dure.launch.worker.questions import wait_for_answers
from dure.launch.worker.responder import ENDING, STACKS_SIGNAL, STATE
from dure.launch.worker.stacks import Threads, head, is_stopped, proc_stat, written_stacks
from dure.launch.worker.worker_process import Worker
from dure.process.heartbeat import Heartbeats

_PATIENCE_SECONDS = 1.0
"""Timeout of a reply. A rank that exceeds it cannot reply: it is stopped, or native code holds the interpreter."""
_NUM_SAMPLES, _SAMPLE_SECONDS = 10, 0.01
_NUM_QUIET = 10
"""Number of samples without new output after which the stacks are complete."""
_TGKILL = {"x86_64": 234, "aarch64": 131}
"""Number of the system call that sends a signal to one thread, by architecture; Python has no function for it."""
_STACKS = re.compile(r"^stacks (\d+)$", re.M)
_OBSERVER = re.compile(r"^observer (\d+)$", re.M)


def examine(workers: Sequence[Worker], heartbeats: Heartbeats) -> list[RankState]:
    """Probe all ranks at the same time, in at most about three seconds, whatever they are doing."""
    alive = [worker for worker in workers if worker.end is None]
    began = time.monotonic()
    # before the requests: a rank waits for its own observer, which needs the GIL
    fractions = _fractions(alive)
    answers = _answers(alive)
    mute = [worker for worker in alive if worker.rank not in answers and not is_stopped(worker.pid)]
    stacks = _written_stacks(mute)
    states = []
    for worker in workers:
        beat = heartbeats.last(worker.rank)
        busy, blocked = fractions.get(worker.rank, (0.0, 0.0))
        fields = (
            {} if worker.end is not None else _state_fields(worker, answers.get(worker.rank), stacks.get(worker.rank))
        )
        state = RankState(
            rank=worker.rank,
            pid=worker.pid,
            step=beat.step,
            phase=beat.phase,
            silent_seconds=began - beat.time if beat.time else 0.0,
            sequence=beat.sequence,
            exit_code=None if worker.end is None else worker.end.exit_code,
            busy_fraction=busy,
            blocked_fraction=blocked,
            **fields,
        )
        states.append(state)
    return states


def _state_fields(worker: Worker, answer: Mapping[str, Any] | None, stacks: Threads | None) -> dict[str, Any]:
    """Return the fields of a rank's state, from its own reply or from the system."""
    failure = worker.reported_failure()
    fields: dict[str, Any] = {
        "failure": None if failure is None else failure_in_brief(failure),
        "is_stopped": is_stopped(worker.pid),
        "has_closed_socket": worker.questions.is_over,
    }
    if answer is None:
        main, others = stacks or ((), ())
        return {**fields, "main": main, "others": others}
    return {
        **fields,
        "main": frames_from(answer["main"]),
        "others": tuple(frames_from(frames) for frames in answer["others"]),
        "collectives": tuple(collective_from(one) for one in answer["collectives"]),
        "call": answer["call"] and Call(**answer["call"]),
        "called": answer["called"],
        "groups": answer["groups"],
        "calls": answer["calls"],
        "handled": answer["handled"],
    }


def ask_how_they_end(workers: Sequence[Worker]) -> None:
    """Note which exceptions ranks are handling, in brief, as in a `finally`, and when they left the others."""
    alive = {worker.rank: worker for worker in workers if worker.end is None}
    for rank, answer in _answers(list(alive.values()), ENDING).items():
        alive[rank].handled, alive[rank].left_group_at = answer["handled"], answer["left_group_at"]


def _answers(workers: Sequence[Worker], what: str = STATE) -> dict[int, Mapping[str, Any]]:
    """Send requests, and collect the replies that arrive before the timeout."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    waiting = {worker: worker.questions.ask(what) for worker in workers if not is_stopped(worker.pid)}
    done: dict[int, Mapping[str, Any]] = {}
    while waiting and (left := deadline - time.monotonic()) > 0:
        wait_for_answers([worker.questions for worker in waiting], left)
        for worker, number in list(waiting.items()):
            answer = worker.questions.take(number)
            if answer is not None:
                done[worker.rank] = answer
            if answer is not None or worker.questions.is_over:
                del waiting[worker]
    return done


def _written_stacks(workers: Sequence[Worker]) -> dict[int, Threads]:
    """Make ranks that do not reply write their stacks with a signal, and wait until these are complete."""
    began_at = {worker.rank: os.fstat(worker.stacks_fd).st_size for worker in workers}
    for worker in workers:
        _ask_by_signal(worker)
    before: dict[int, int] = {}
    num_quiet = 0
    deadline = time.monotonic() + (_PATIENCE_SECONDS if workers and STACKS_SIGNAL is not None else 0.0)
    while time.monotonic() < deadline:
        here = [worker for worker in workers if proc_stat(worker.pid)[0] not in "?Z"]
        sizes = {worker.rank: os.fstat(worker.stacks_fd).st_size for worker in here}
        num_quiet = num_quiet + 1 if sizes == before else 0
        if num_quiet > _NUM_QUIET and all(size > began_at[rank] for rank, size in sizes.items()):
            break
        before = sizes
        time.sleep(_SAMPLE_SECONDS)
    return {worker.rank: written_stacks(worker.stacks_fd, began_at[worker.rank]) for worker in workers}


def _ask_by_signal(worker: Worker) -> None:
    """Send the signal to the observing thread, because in any other it would interrupt a system call of the script."""
    if STACKS_SIGNAL is None:
        return
    header = head(worker.stacks_fd)
    if not _has_stacks_open(worker, header):
        return
    observer = _OBSERVER.search(header)
    call = _TGKILL.get(os.uname().machine) if sys.platform == "linux" else None
    if observer is None or call is None:
        with suppress(OSError):
            worker.send(STACKS_SIGNAL)
    else:
        ctypes.CDLL(None).syscall(call, worker.pid, int(observer[1]), int(STACKS_SIGNAL))


def _has_stacks_open(worker: Worker, header: str) -> bool:
    """Return whether the handler would write to the stacks file: a script may have reused its descriptor."""
    descriptor = _STACKS.search(header)
    if descriptor is None:
        return True
    try:
        return os.path.samestat(os.stat(f"/proc/{worker.pid}/fd/{descriptor[1]}"), os.fstat(worker.stacks_fd))
    except OSError:
        return not os.path.isdir("/proc/self/fd")


def _fractions(workers: Sequence[Worker]) -> dict[int, tuple[float, float]]:
    """Return the fractions of time in which each main thread could run, and in which the kernel kept it waiting."""
    counts: dict[int, Counter[str]] = {worker.rank: Counter() for worker in workers}
    used = {worker.rank: _used_seconds(worker.pid) for worker in workers}
    began = time.monotonic()
    for _ in range(_NUM_SAMPLES):
        for worker in workers:
            counts[worker.rank][proc_stat(worker.pid)[0]] += 1
        time.sleep(_SAMPLE_SECONDS)
    seconds = time.monotonic() - began

    def busy(worker: Worker) -> float:
        # the system adds a wait for a core when it is over, and single samples are not representative
        by_time = min(1.0, (_used_seconds(worker.pid) - used[worker.rank]) / seconds)
        return max(counts[worker.rank]["R"] / _NUM_SAMPLES, by_time)

    return {worker.rank: (busy(worker), counts[worker.rank]["D"] / _NUM_SAMPLES) for worker in workers}


def _used_seconds(pid: int) -> float:
    """Return the seconds for which a main thread has run or waited for a core; 0 if the system does not count them."""
    try:
        with open(f"/proc/{pid}/task/{pid}/schedstat", encoding="ascii") as file:
            ran, waited, _ = file.read().split()
    except (OSError, ValueError):
        return 0.0
    return (int(ran) + int(waited)) / 1e9
