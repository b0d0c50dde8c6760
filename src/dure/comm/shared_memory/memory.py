"""Shared memory of the ranks of a host, with a barrier.

The memory is a memfd. It has no name, so that nothing of it can be left in `/dev/shm`, however its users end. Rank 0
creates it, the others open it through `/proc/<pid>/fd`, and then its descriptor is closed.

The memory begins with one cell per rank: two cache lines that only this rank writes. A barrier is a sequence number. A
rank writes the number of barriers it has reached into its own cell, and waits until every other cell has reached it.
This is the dissemination of arrival flags without a shared counter (Mellor-Crummey and Scott 1991, section 3). The cell
also says whether its rank has left, and holds the number of its call, so that ranks in different calls find out at
once.

After the cells come `NUM_WINDOWS` buffers with a slot per rank. Before barrier `n` a rank writes to buffer `n %
NUM_WINDOWS`. After barrier `n` that buffer may be read, and its slots written once more; these may be read after
barrier `n + 1`. After barrier `n + 2` the buffer is free again. If every collective follows this rule, none must wait
for the readers of the one before.
"""

import ctypes
import fcntl
import mmap
import os
import secrets
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dure.comm.shared_memory import futex
from dure.comm.shared_memory.call_number import describe
from dure.errors import EnvironmentLacks, PeerLost, RanksDisagree

NUM_WINDOWS = 3

_NAME = "dure-shm"
"""Name of the memory in `/proc`, which need not be unique."""

_LINE_BYTES = 64
_CELL_BYTES = 2 * _LINE_BYTES  # processors fetch lines in pairs
_CELL_WORDS = _CELL_BYTES // 8
_ARRIVED, _ASLEEP, _CALLS, _STATE = 0, 1, 2, 4
"""Indices of the words of a cell: barriers reached; last barrier that its rank has slept for; calls of the last two
barriers; one of the states below."""
_PRESENT, _LEFT, _FAILED = 0, 1, 2

_NUM_YIELDS = 20
"""Number of times that a waiter polls and yields before it sleeps. That takes about 15 us, as long as to fall asleep
and be woken."""
_CLOSED = "connection closed by it"
TIMED_OUT = "Timed out: the timeout is over"
"""Wording of torch's own errors, for which scripts search."""
_SLICE_SECONDS = 0.05
"""Maximum seconds that a waiter sleeps before it checks that the other ranks are alive."""
_STOPPED_SECONDS = 1.0
"""Time for such a sleep after which this process was stopped, as by Ctrl-Z, which stops all: it does not count."""

Exchange = Callable[[list[int]], list[list[int]]]
"""Function that sends a list of integers to all ranks and returns the lists of all ranks, by rank."""


class SharedMemory:
    """Memory of all ranks of a group on one host, as used by one of them, from one thread at a time."""

    def __init__(
        self,
        memory: mmap.mmap,
        peers: Sequence["Peer"],
        *,
        rank: int,
        slot_bytes: int,
        timeout_seconds: float,
        names: Sequence[int] | None = None,
    ) -> None:
        """Use memory that all ranks have mapped; created by `open_shared_memory`.

        Args:
            memory: Memory of `shared_bytes(world_size, slot_bytes)`, initially zero.
            peers: Processes of all ranks, by rank.
            rank: Rank of this process.
            slot_bytes: Bytes of a rank's slot in a buffer, a multiple of 64.
            timeout_seconds: Maximum time that a barrier waits for a rank.
            names: Numbers of the ranks in errors; None for their ranks in this group.
        """
        self.rank = rank
        self.world_size = len(peers)
        self.slot_bytes = slot_bytes
        self.timeout_seconds = timeout_seconds
        self.window = 1
        """Number of the next barrier, which determines the buffer to write to."""
        self.written_bytes = 0
        """Bytes that this rank has written for others so far."""
        self.failure = ""
        """Reason why no further call can be made; empty while the group works."""
        self._is_in_call = False
        self._peers = peers
        self._names = names or range(self.world_size)
        self._words = memoryview(memory).cast("Q")
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._address = self._bytes.data_ptr()
        self._slots = _first_slot(self.world_size)
        self._own = rank * _CELL_WORDS
        self._others = [(peer, peer * _CELL_WORDS) for peer in range(self.world_size) if peer != rank]
        self._views: dict[tuple[int, int, int, int, torch.dtype], Tensor] = {}
        self._is_closing = threading.Event()
        self._pid = os.getpid()

    def slot(self, rank: int, window: int) -> int:
        """Return the address of a rank's slot in the buffer of a window."""
        return self._address + self._slots + (window % NUM_WINDOWS * self.world_size + rank) * self.slot_bytes

    def write(self, window: int, start: int, source: int, num_bytes: int) -> None:
        """Copy memory of this process into this rank's slot, for others to read.

        Args:
            window: Window of the buffer.
            start: Offset in the slot, in bytes.
            source: Address to copy from.
            num_bytes: Number of bytes.
        """
        ctypes.memmove(self.slot(self.rank, window) + start, source, num_bytes)
        self.written_bytes += num_bytes

    def view(self, rank: int, window: int, start: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return elements of a slot as a tensor.

        Args:
            rank: Rank of the slot.
            window: Window of the buffer.
            start: Offset in the slot in bytes, a multiple of the element size.
            num_elements: Number of elements.
            dtype: Dtype of the elements.
        """
        key = (rank, window % NUM_WINDOWS, start, num_elements, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= 1024:  # calls of a training step repeat; the views of others must not accumulate
                self._views.clear()
            first = self.slot(rank, window) - self._address + start
            view = self._views[key] = self._bytes[first : first + num_elements * dtype.itemsize].view(dtype)
        return view

    def make(self, call: Callable[[], None]) -> None:
        """Run a whole call; if it fails, refuse all later ones.

        A rank that leaves a call halfway (by an exception from a signal handler) may have announced its part to the
        others already. They would read its later writes as values of this call, so it must not write again.

        Args:
            call: Function that writes, meets and reads.

        Raises:
            PeerLost: An earlier call failed, or this one did because of another rank.
            RanksDisagree: A rank is in another call.
        """
        self.refuse_after_failure()
        if self._is_in_call:
            # a signal handler made a call during another one, or a second exception interrupted the handling of a first
            self._give_up("another call was under way in the same thread, or had broken off")
            self.refuse_after_failure()
        self._is_in_call = True
        try:
            call()
        except BaseException as error:
            self._give_up(f"it broke off with {type(error).__name__}{f' ({error})' if str(error) else ''}")
            raise
        self._is_in_call = False

    def refuse_after_failure(self) -> None:
        """Raise an error if no further call can be made.

        Raises:
            PeerLost: An earlier call failed; the message names the failure.
        """
        if self.failure:
            raise PeerLost(
                f"an earlier call of this group failed, so none can follow: {self.failure}; make a new process group"
            )

    def meet(self, call: int = 0) -> None:
        """Wait until all ranks have reached this barrier.

        Args:
            call: Number of this rank's call, below 2**64; `describe` returns its text.

        Raises:
            PeerLost: A rank's process ended, it left, or it did not arrive in time.
            RanksDisagree: A rank arrived in another call.
        """
        words, window, own = self._words, self.window, self._own
        if self._pid != os.getpid():
            raise RuntimeError(
                f"the shared memory belongs to process {self._pid}, but a child forked from it used it: "
                "make a process group in the child"
            )
        self.refuse_after_failure()
        words[own + _CALLS + (window & 1)] = call
        futex.fence(self._address)
        words[own] = window
        for _, cell in self._others:
            if words[cell + _ASLEEP] >= window:
                futex.wake(self._address + own * 8)
                break
        for _, cell in self._others:
            if words[cell] < window:
                self._wait_for(cell, window, call)
        futex.fence(self._address)
        for peer, cell in self._others:
            if words[cell + _CALLS + (window & 1)] != call:
                raise RanksDisagree(
                    self._give_up(
                        f"{self._name(peer)} called {describe(words[cell + _CALLS + (window & 1)])} where "
                        f"{self._name(self.rank)} called {describe(call)}, but all ranks of a group must make the same "
                        "calls in the same order: look for what differs between them"
                    )
                )
        self.window = window + 1

    def leave(self) -> None:
        """Announce that this rank will reach no further barrier; does nothing in a forked child."""
        if self._pid == os.getpid():
            self._words[self._own + _STATE] = _FAILED if self.failure else _LEFT
            futex.wake(self._address + self._own * 8)

    def interrupt(self) -> None:
        """Make a barrier in which another thread waits raise PeerLost, within 50 ms."""
        self._is_closing.set()

    def close(self) -> None:
        """Leave; the memory is freed when no view of it is left."""
        self.leave()
        for peer in self._peers:
            peer.close()
        self._views.clear()

    def _wait_for(self, cell: int, window: int, call: int) -> None:
        words = self._words
        for _ in range(_NUM_YIELDS):
            if words[cell] >= window:
                return
            os.sched_yield()  # gives the interpreter to other threads too
        now = time.monotonic()
        deadline = now + self.timeout_seconds
        address = self._address + cell * 8
        while True:
            # announced before the last check: a rank that arrives later will see it, and wake this one
            words[self._own + _ASLEEP] = window
            seen = words[cell]
            if seen >= window:
                return
            futex.wait(address, seen, _SLICE_SECONDS)
            if words[cell] >= window:
                return
            before, now = now, time.monotonic()
            if now - before > _STOPPED_SECONDS:
                deadline += now - before
            lost = self._find_lost(window, is_over=now >= deadline)
            if lost and words[cell] < window:  # it may have come and then gone
                failure = f"{lost[0]} while {self._name(self.rank)} waited in {describe(call)} ({lost[1]})"
                raise PeerLost(self._give_up(failure))

    def _give_up(self, failure: str) -> str:
        """Refuse further calls, because barrier numbers no longer match; the first failure is kept."""
        self.failure = self.failure or failure
        self.leave()
        return failure

    def _find_lost(self, window: int, *, is_over: bool) -> tuple[str, str] | None:
        """Return a description of the rank that will not arrive and torch's wording for the error, or None."""
        late = [(peer, cell) for peer, cell in self._others if self._words[cell] < window]
        for peer, cell in late:
            state = self._words[cell + _STATE]
            if state != _PRESENT and self._words[cell] < window:
                return f"{self._name(peer)} {'left the group' if state == _LEFT else 'gave up after an error'}", _CLOSED
        for peer, cell in late:
            if self._peers[peer].has_ended() and self._words[cell] < window:
                return f"{self._name(peer)} (process {self._peers[peer].pid}) ended", _CLOSED
        if self._is_closing.is_set():
            return "the group was destroyed", _CLOSED
        if is_over and late:
            names = ", ".join(self._name(peer) for peer, _ in late)
            return f"{names} did not come within {self.timeout_seconds:g} s", TIMED_OUT
        return None

    def _name(self, rank: int) -> str:
        return f"rank {self._names[rank]}"


class Peer:
    """Process of a rank, watched by a pidfd, so that a new process with the same id is not mistaken for it."""

    def __init__(self, pid: int, start_time: int) -> None:
        self.pid = pid
        self._start_time = start_time
        self._fd: int | None = None
        self._ends = select.poll()
        try:
            self._fd = os.pidfd_open(pid)
        except OSError:  # old kernel or sandbox, or the process has just ended
            return
        if start_time_of(pid) == start_time:
            self._ends.register(self._fd, select.POLLIN)
        else:
            self.close()

    def has_ended(self) -> bool:
        """Return whether the process is gone or a zombie."""
        if self._fd is not None:
            return bool(self._ends.poll(0))
        return start_time_of(self.pid) != self._start_time

    def close(self) -> None:
        """Close the descriptor."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def start_time_of(pid: int) -> int:
    """Return the start time of a live process in ticks since boot; -1 if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # its name may contain blanks and brackets
    except OSError:
        return -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


def open_shared_memory(
    exchange: Exchange,
    *,
    rank: int,
    world_size: int,
    slot_bytes: int,
    timeout_seconds: float,
    names: Sequence[int] | None = None,
) -> SharedMemory:
    """Create one memory for all ranks of a group. Every rank calls this.

    Args:
        exchange: Exchange of integers with all ranks.
        rank: Rank of this process.
        world_size: Number of ranks.
        slot_bytes: See `SharedMemory`.
        timeout_seconds: Maximum time that a barrier waits for a rank.
        names: Numbers of the ranks in errors; None for their ranks in this group.

    Returns:
        The memory, with its pages allocated.

    Communication: two exchanges of a few numbers, blocking.

    Raises:
        EnvironmentLacks: A rank cannot reach rank 0's memory, because it is on another host or in another container.
            Raised on all ranks.
    """
    memory, without, gathered = _open_memory(exchange, rank, shared_bytes(world_size, slot_bytes), slot_bytes)
    if memory is None:
        raise EnvironmentLacks(
            f"rank{'s' * (len(without) > 1)} {', '.join(map(str, without))} cannot open the memory of rank 0, but shm "
            "needs all ranks in one Linux host and one container: take ring or hierarchical between hosts"
        )
    peers = [Peer(pid, start_time) for pid, start_time, *_ in gathered]
    return SharedMemory(memory, peers, rank=rank, slot_bytes=slot_bytes, timeout_seconds=timeout_seconds, names=names)


def open_common_bytes(exchange: Exchange, *, rank: int, world_size: int, num_bytes: int) -> Tensor | None:
    """Create memory with a row for every rank, mapped by all of them. Every rank calls this.

    Args:
        exchange: Exchange of integers with all ranks.
        rank: Rank of this process.
        world_size: Number of ranks.
        num_bytes: Bytes of a row, the same on all ranks.

    Returns:
        (world_size, at least num_bytes) zeros of uint8, each row on its own pages; None on all ranks if one of them
            cannot map the memory.

    Communication: two exchanges of a few numbers, blocking.
    """
    row = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = _open_memory(exchange, rank, world_size * row, row)[0]
    return None if memory is None else torch.frombuffer(memory, dtype=torch.uint8).view(world_size, row)


def _open_memory(
    exchange: Exchange, rank: int, num_bytes: int, agreed: int
) -> tuple[mmap.mmap | None, list[int], list[list[int]]]:
    """Create memory on rank 0 and map it on all ranks.

    Returns:
        Memory, or None if a rank cannot map it; the ranks that cannot; process id and start time of all ranks, with
            further numbers.
    """
    fd, token = _create(num_bytes) if rank == 0 else (-1, 0)
    try:
        gathered = exchange([os.getpid(), start_time_of(os.getpid()), fd, token, agreed])
        memory = _map(fd, num_bytes, pid=gathered[0][0], theirs=gathered[0][2], token=gathered[0][3])
        has_memory = exchange([int(memory is not None and gathered[0][4] == agreed)])
    finally:
        if fd >= 0:
            os.close(fd)
    without = [rank for rank, (has,) in enumerate(has_memory) if not has]
    return None if without else memory, without, gathered


def shared_bytes(world_size: int, slot_bytes: int) -> int:
    """Return the size of the memory in bytes: the cells, and a slot per rank in each buffer."""
    return _first_slot(world_size) + NUM_WINDOWS * world_size * slot_bytes


def _first_slot(world_size: int) -> int:
    return -(-world_size * _CELL_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


def _create(num_bytes: int) -> tuple[int, int]:
    """Return a memory's descriptor and the random token stored after its end, or (-1, 0) if none can be created."""
    token = secrets.randbits(62)
    fd = -1
    try:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, num_bytes + 8)
        # a process that shortened it would end all others by SIGBUS
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.pwrite(fd, token.to_bytes(8, sys.byteorder), num_bytes)
    except (OSError, AttributeError):  # no space, or no memfd on this system
        if fd >= 0:
            os.close(fd)
        return -1, 0
    return fd, token


def _map(fd: int, num_bytes: int, *, pid: int, theirs: int, token: int) -> mmap.mmap | None:
    """Map the memory, by its own descriptor or by another process's; return None if it lacks the token."""
    if theirs < 0:
        return None
    opened = -1
    try:
        if fd < 0:
            path = f"/proc/{pid}/fd/{theirs}"
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                return None  # an unrelated process on another host: opening its files may have side effects
            fd = opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.pread(fd, 8, num_bytes) != token.to_bytes(8, sys.byteorder):
            return None
        return mmap.mmap(fd, num_bytes)
    except OSError:
        return None
    finally:
        if opened >= 0:
            os.close(opened)
