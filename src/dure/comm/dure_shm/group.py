"""A process group with a memory, a gloo and a thread: what the calls of the backend `dure_shm` run on."""

import os
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dure.comm.algorithms.shm import slot_bytes_for
from dure.comm.dure_shm.work import SharedMemoryWork, run_works
from dure.comm.shared_memory.memory import SharedMemory, open_shared_memory
from dure.errors import EnvironmentLacks
from dure.torchcompat import calls_of_gloo, give_gloo

NAME = "dure_shm"

_GRACE_SECONDS = 1.0
"""Seconds that calls that were not waited for may go on when the group is destroyed."""


class QueuedGroup(dist.ProcessGroup):
    """The group itself: its memory, the order of its calls, and its end. The calls are those of a subclass."""

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, timeout: timedelta, global_ranks: Sequence[int]
    ) -> None:
        """Connect gloo, and make the memory if all ranks can. Every rank calls it.

        Communication: gloo's rendezvous through the store, then two all_gather of a few numbers.

        Args:
            store: Of this group alone.
            rank: In this group.
            world_size: Of this group.
            timeout: How long a call waits for a rank.
            global_ranks: What the ranks are called in errors; empty calls them by their rank here.
        """
        super().__init__(rank, world_size)  # type: ignore[call-arg]  # the only one that a class of Python may call
        self._store = store
        self._gloo = give_gloo(self, store, rank, world_size, timeout)
        self._timeout_seconds = timeout.total_seconds()
        self._pid = os.getpid()
        self._memory: SharedMemory | None = None
        self.why_gloo = ""
        """Reason why the memory is not used; empty if it is."""
        try:
            self._memory = open_shared_memory(
                self._exchange,
                rank=rank,
                world_size=world_size,
                slot_bytes=slot_bytes_for(world_size),
                timeout_seconds=timeout.total_seconds(),
                names=global_ranks or None,
            )
        except EnvironmentLacks as lack:
            self.why_gloo = str(lack)
        self._works: queue.SimpleQueue[SharedMemoryWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: SharedMemoryWork | None = None
        self._order = threading.RLock()  # a signal handler may make a call in the middle of another
        self._num_started = -calls_of_gloo(self)
        """Calls through the memory, less those of gloo for the meeting here."""

    def _exchange(self, numbers: list[int]) -> list[list[int]]:
        said = [torch.empty(len(numbers), dtype=torch.int64) for _ in range(self.size())]
        self._gloo.allgather([said], [torch.tensor(numbers)]).wait()
        return [tensor.tolist() for tensor in said]

    def getBackendName(self) -> str:
        """Return the name that the group was asked for by; torch asks under this one."""
        return NAME

    def _get_sequence_number_for_group(self) -> int:
        """Return how many calls were made, through the memory or gloo; `SequenceNumber` asks under torch's name."""
        return self._num_started + calls_of_gloo(self)

    def set_timeout(self, timeout: timedelta) -> None:
        """Let calls from now on wait so long for a rank."""
        self._timeout_seconds = timeout.total_seconds()

    def get_group_store(self) -> dist.Store:
        """Return the store of this group."""
        return self._store

    def shutdown(self) -> None:
        """Leave the memory. Calls that were not waited for have a second to end."""
        if self._pid == os.getpid():
            self._end(_GRACE_SECONDS)
            self._gloo.shutdown()

    def abort(self) -> None:
        """Leave the memory at once; calls under way fail."""
        if self._pid == os.getpid():
            self._end(0.0)
            self._gloo.abort()

    def __del__(self) -> None:
        works = getattr(self, "_works", None)  # none if making the group failed
        if works is not None:
            works.put(None)

    def _end(self, grace_seconds: float) -> None:
        thread, self._thread = self._thread, None
        self._works.put(None)
        if thread is not None and thread.ident is not None:
            thread.join(grace_seconds)
            if thread.is_alive() and self._memory is not None:
                self._memory.interrupt()
                thread.join()
        if self._memory is not None:
            self._memory.close()

    # -- running -------------------------------------------------------------------------------------------------

    def _start(self, run: Callable[[SharedMemory], None], outputs: Any, opts: Any) -> dist.Work:
        """Run a call, or let the thread run it after those that are under way."""
        memory = self._memory
        assert memory is not None
        if self._pid != os.getpid():
            raise RuntimeError(
                f"the process group belongs to process {self._pid}, but a child forked from it made a call: "
                "make a process group in the child"
            )
        seconds = opts.timeout.total_seconds()
        if seconds < 0:  # nothing was said
            seconds = self._timeout_seconds

        def run_in_memory() -> None:
            memory.timeout_seconds = seconds
            memory.make(lambda: run(memory))

        work = SharedMemoryWork(run_in_memory, outputs)
        with self._order:
            self._num_started += 1
            # what a future's callback calls runs in the thread that would have to run it, and may be waited for there
            is_in_callback = threading.current_thread() is self._thread
            if is_in_callback or (not opts.asyncOp and (self._last is None or self._last.is_completed())):
                work.run()
                return work
            if self._thread is None or self._thread.ident is None:  # its start may have been interrupted
                self._thread = threading.Thread(target=run_works, args=(self._works,), name="dure_shm", daemon=True)
                self._thread.start()
            self._last = work
            self._works.put(work)
        return work
