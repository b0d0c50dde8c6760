"""Threads of this process as the ranks of one shared memory, each with a view of its own."""

import mmap
import os
import threading
from collections.abc import Callable
from typing import Any

from dure.comm.shared_memory.memory import Peer, SharedMemory, shared_bytes, start_time_of

SLOT_BYTES = 4096
"""Small, so that short vectors need many rounds. A multiple of 64 bytes per rank for 1, 2 and 4 ranks."""


def in_threads(
    num_ranks: int,
    work: Callable[[SharedMemory], Any],
    *,
    timeout_seconds: float = 10.0,
    processes: list[int] | None = None,
    slot_bytes: int = SLOT_BYTES,
) -> list[Any]:
    """Return what `work(memory)` returned on each rank, an exception as its object.

    Args:
        processes: Which processes the ranks take each other for; None says this one.
    """
    started = [(pid, start_time_of(pid)) for pid in processes or [os.getpid()] * num_ranks]
    slot_bytes *= num_ranks
    shared = mmap.mmap(-1, shared_bytes(num_ranks, slot_bytes))
    memories = [
        SharedMemory(
            shared,
            [Peer(*process) for process in started],
            rank=rank,
            slot_bytes=slot_bytes,
            timeout_seconds=timeout_seconds,
        )
        for rank in range(num_ranks)
    ]
    answers: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            answers[rank] = work(memories[rank])
        except Exception as error:
            answers[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for memory in memories:
        memory.close()
    return answers
