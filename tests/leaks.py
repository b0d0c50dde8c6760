"""Leaks of a test: nothing may be left behind. Snapshots before and after it are compared (`tests/conftest.py`)."""

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from dure.launch.worker.fork_safety import reason_fork_would_fail

SET_BY_LIBRARIES = {
    "PYTEST_CURRENT_TEST",
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn, at import
    "KMP_INIT_AT_FORK",  # scikit-learn, at import
    "TORCHINDUCTOR_CACHE_DIR",  # torch.compile, first use
    "TRITON_CACHE_DIR",  # torch.compile, first use
}
KEPT_BY_LIBRARIES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch_shm_manager")
"""Processes that Python and torch start once and keep until the interpreter ends."""

GRACE_SECONDS = 2.0
"""A process or thread that was told to end needs a moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """State of the test process at one moment."""

    environment: dict[str, str]
    children: frozenset[psutil.Process]
    listening: frozenset[tuple[str, int]]
    threads: frozenset[threading.Thread]
    unforkable: str | None
    """Reason why ranks could not be forked from here: OpenMP's threads, once started, sleep until the process ends."""


def take_snapshot() -> Snapshot:
    """Look at this process: environment, children, listening ports, non-daemon threads. About 1 ms."""
    me = psutil.Process()
    listening = (c.laddr for c in me.net_connections(kind="tcp") if c.status == psutil.CONN_LISTEN)
    return Snapshot(
        environment={key: value for key, value in os.environ.items() if key not in SET_BY_LIBRARIES},
        children=frozenset(child for child in _descendants(me.pid) if _is_a_leak(child)),
        listening=frozenset((address.ip, address.port) for address in listening),
        threads=frozenset(thread for thread in threading.enumerate() if not thread.daemon),
        unforkable=reason_fork_would_fail(threads=2),
    )


def find_leaks(before: Snapshot) -> list[str]:
    """Return one sentence for each thing that is there now and was not before."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (leaks := _differences(before, take_snapshot())) and time.monotonic() < deadline:
        gc.collect()  # a store's socket lives as long as the object
        time.sleep(0.02)
    return leaks


def clean_up(before: Snapshot) -> None:
    """Take away what leaked, so that the next test is judged for its own leaks."""
    os.environ.update(before.environment)
    for key in set(os.environ) - set(before.environment) - SET_BY_LIBRARIES:
        del os.environ[key]
    left = take_snapshot().children - before.children
    for child in left:
        child.kill()
    psutil.wait_procs(left, timeout=GRACE_SECONDS)
    if _has_process_group():
        sys.modules["torch.distributed"].destroy_process_group()


def _differences(before: Snapshot, after: Snapshot) -> list[str]:
    changed = {key for key, _ in before.environment.items() ^ after.environment.items()}
    leaks = [f"environment variable {key} was changed" for key in sorted(changed)]
    leaks += [f"process {child.pid} is still running: {_command(child)}" for child in after.children - before.children]
    leaks += [f"{ip}:{port} is still listening" for ip, port in sorted(after.listening - before.listening)]
    leaks += [f"thread {thread.name} is still running" for thread in after.threads - before.threads]
    if after.unforkable and not before.unforkable:
        leaks.append(f"{after.unforkable}: later tests cannot fork their ranks")
    if _has_process_group():
        leaks.append("the default process group was not destroyed")
    return leaks


def _has_process_group() -> bool:
    # not imported here: most tests need no torch
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())


def _descendants(pid: int) -> Iterator[psutil.Process]:
    # psutil looks at every process of the machine to find them, which takes 3 ms
    with suppress(OSError, psutil.NoSuchProcess):  # it ends meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                yield psutil.Process(int(child))
                yield from _descendants(int(child))


def _is_a_leak(child: psutil.Process) -> bool:
    try:
        # a zombie holds nothing; multiprocessing reaps its own at its next call
        return child.status() != psutil.STATUS_ZOMBIE and not any(kept in _command(child) for kept in KEPT_BY_LIBRARIES)
    except psutil.NoSuchProcess:
        return False


def _command(child: psutil.Process) -> str:
    try:
        return " ".join(child.cmdline())[:200]
    except psutil.Error:
        return "(gone)"
