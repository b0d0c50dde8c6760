"""Process group with shared memory, a gloo group and a thread, on which the calls of the backend `dure_shm` run."""

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
from dure.torchcompat.calls import calls_of_gloo
from dure.torchcompat.collectives import give_gloo

NAME = "dure_shm"

_GRACE_SECONDS = 1.0
"""Seconds that pending asynchronous calls may continue when the group is destroyed."""


class QueuedGroup(dist.ProcessGroup):
    """Process group: its memory, the order of its calls, and its end. A subclass implements the calls."""

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, timeout: timedelta, global_ranks: Sequence[int]
    ) -> None:
        """Connect gloo, and create the memory if all ranks can. Every rank calls this.

        Communication: gloo's rendezvous through the store, then two all_gather of a few numbers.

        Args:
            store: Store of this group alone.
            rank: Rank in this group.
            world_size: Number of ranks of this group.
            timeout: Maximum time that a call waits for a rank.
            global_ranks: Names of the ranks in errors; empty to use their ranks in this group.
        """
        super().__init__(rank, world_size)  # type: ignore[call-arg]  # the only one that a class of Python may call
        self._store = store
        self._gloo = give_gloo(self, store, rank, world_size, timeout)
        self._timeout_seconds = timeout.total_seconds()
        self._pid = os.getpid()
        self._memory: SharedMemory | None = None
        self.why_gloo = ""
        """Reason why the memory is not used; empty if it is used."""
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
        self._order = threading.RLock()  # a signal handler may make a call during another one
        self._num_started = -calls_of_gloo(self)
        """Number of calls through the memory, minus those of gloo during the setup here."""

    def _exchange(self, numbers: list[int]) -> list[list[int]]:
        gathered = [torch.empty(len(numbers), dtype=torch.int64) for _ in range(self.size())]
        self._gloo.allgather([gathered], [torch.tensor(numbers)]).wait()
        return [tensor.tolist() for tensor in gathered]

    def getBackendName(self) -> str:
        """Return the name under which the group was requested, which torch asks for."""
        return NAME

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of calls through the memory or gloo; the method has torch's name, for `SequenceNumber`."""
        return self._num_started + calls_of_gloo(self)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time that later calls wait for a rank."""
        self._timeout_seconds = timeout.total_seconds()

    def get_group_store(self) -> dist.Store:
        """Return the store of this group."""
        return self._store

    def shutdown(self) -> None:
        """Leave the memory. Pending asynchronous calls have a second to end."""
        if self._pid == os.getpid():
            self._end(_GRACE_SECONDS)
            self._gloo.shutdown()

    def abort(self) -> None:
        """Leave the memory at once; pending calls fail."""
        if self._pid == os.getpid():
            self._end(0.0)
            self._gloo.abort()

    def __del__(self) -> None:
        works = getattr(self, "_works", None)  # None if the creation of the group failed
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
        """Run a call, or have the thread run it after the pending ones."""
        memory = self._memory
        assert memory is not None
        if self._pid != os.getpid():
            raise RuntimeError(
                f"the process group belongs to process {self._pid}, but a child forked from it made a call: "
                "make a process group in the child"
            )
        seconds = opts.timeout.total_seconds()
        if seconds < 0:  # no timeout was given
            seconds = self._timeout_seconds

        def run_in_memory() -> None:
            memory.timeout_seconds = seconds
            memory.make(lambda: run(memory))

        work = SharedMemoryWork(run_in_memory, outputs)
        with self._order:
            self._num_started += 1
            # a call from a future's callback runs in the group's thread itself, which may also wait for it
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
