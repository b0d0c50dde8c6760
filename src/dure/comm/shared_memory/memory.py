"""One memory for the ranks of a host, and the barrier on it.

The memory is a memfd: it has no name, so nothing of it can be left in `/dev/shm`, however its users end. Rank 0 makes
it, the others open it through `/proc/<pid>/fd`, and then its descriptor is closed.

In front stands one cell per rank, two cache lines that only this rank writes.
A barrier is a sequence number: a rank writes how many barriers it has reached into its own cell and waits until every
other cell has got as far (Mellor-Crummey and Scott 1991, section 3, the dissemination of arrival flags without a
shared counter). The cell also says which call its rank is in, so that ranks which do not agree find out at once, and
whether it has left.

Behind the cells are `NUM_WINDOWS` buffers with a slot per rank. What a rank writes before barrier `n` it writes to
buffer `n % NUM_WINDOWS`. It may be read, and its slot be written once more, after barrier `n`, and that be read after
barrier `n + 1`; after barrier `n + 2` the buffer is free again. As long as every collective keeps to that, none has to
wait for the readers of the one before.
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
"""Indices of the words of a cell: barriers reached; the last barrier that its rank has slept for; the call of each of
the last two barriers; one of the states below."""
_PRESENT, _LEFT, _FAILED = 0, 1, 2

_NUM_YIELDS = 20
"""Number of times that a waiter polls and yields before it sleeps. That takes about 15 us, as long as going to sleep
and being woken."""
_CLOSED = "connection closed by it"
_SLICE_SECONDS = 0.05
"""Longest sleep in seconds before a waiter checks that the other ranks are alive."""

Exchange = Callable[[list[int]], list[list[int]]]
"""Function that sends some integers to all ranks and returns those of every rank, by rank."""


class SharedMemory:
    """The memory of all ranks of a group on one host, as one of them sees it. One thread uses it at a time."""

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
        """Use memory that all ranks have mapped; `open_shared_memory` is the way to get there.

        Args:
            memory: Of `shared_bytes(world_size, slot_bytes)`, zeroes at first.
            peers: The processes of all ranks, by rank.
            rank: This one.
            slot_bytes: Size of a rank's slot in a buffer, a multiple of 64.
            timeout_seconds: How long a barrier waits for a rank.
            names: What the ranks are called in errors; None calls them by their number here.
        """
        self.rank = rank
        self.world_size = len(peers)
        self.slot_bytes = slot_bytes
        self.timeout_seconds = timeout_seconds
        self.window = 1
        """Number of the next barrier, which says to which buffer to write."""
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
            window: In which buffer.
            start: First byte in the slot.
            source: Address.
            num_bytes: How many.
        """
        ctypes.memmove(self.slot(self.rank, window) + start, source, num_bytes)
        self.written_bytes += num_bytes

    def view(self, rank: int, window: int, start: int, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return elements of a slot as a tensor.

        Args:
            rank: Whose slot.
            window: In which buffer.
            start: First byte in the slot, a multiple of the element's size.
            num_elements: How many.
            dtype: Of what.
        """
        key = (rank, window % NUM_WINDOWS, start, num_elements, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= 1024:  # calls of a training step repeat; others must not pile up
                self._views.clear()
            first = self.slot(rank, window) - self._address + start
            view = self._views[key] = self._bytes[first : first + num_elements * dtype.itemsize].view(dtype)
        return view

    def make(self, call: Callable[[], None]) -> None:
        """Run a whole call; if it breaks off, refuse every later one.

        A rank that leaves a call halfway (an exception from a signal handler) may already have announced its part to
        the others. They would read whatever it writes next as this call's values, so it must not write again.

        Args:
            call: Writes, meets and reads.

        Raises:
            PeerLost: An earlier call failed, or this one did because of another rank.
            RanksDisagree: A rank is in another call.
        """
        self.refuse_after_failure()
        if self._is_in_call:
            # a signal handler makes a call inside another one; or a second exception hit the handling of a first
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
        """Raise if no further call can be made.

        Raises:
            PeerLost: Names the failure.
        """
        if self.failure:
            raise PeerLost(
                f"an earlier call of this group failed, so none can follow: {self.failure}; make a new process group"
            )

    def meet(self, call: int = 0) -> None:
        """Wait until all ranks have come here: the barrier.

        Args:
            call: What this rank is doing, below 2**64; `describe` puts it into words.

        Raises:
            PeerLost: A rank's process ended, it left, or it did not come in time.
            RanksDisagree: A rank came here in another call.
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
        """Tell the others that this rank comes to no further barrier. Does nothing in a forked child."""
        if self._pid == os.getpid():
            self._words[self._own + _STATE] = _FAILED if self.failure else _LEFT
            futex.wake(self._address + self._own * 8)

    def interrupt(self) -> None:
        """Make a barrier that another thread waits in raise PeerLost, within 50 ms."""
        self._is_closing.set()

    def close(self) -> None:
        """Leave, and give the memory back as soon as no view of it is left."""
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
        deadline = time.monotonic() + self.timeout_seconds
        address = self._address + cell * 8
        while True:
            # said before the last look: who comes after it will find it said, and wake this rank
            words[self._own + _ASLEEP] = window
            seen = words[cell]
            if seen >= window:
                return
            futex.wait(address, seen, _SLICE_SECONDS)
            if words[cell] >= window:
                return
            lost = self._find_lost(window, is_over=time.monotonic() >= deadline)
            if lost and words[cell] < window:  # it may have come and then gone
                said = f"{lost[0]} while {self._name(self.rank)} waited in {describe(call)} ({lost[1]})"
                raise PeerLost(self._give_up(said))

    def _give_up(self, failure: str) -> str:
        """Refuse further calls: the numbers of the barriers do not fit any more. The first failure is remembered."""
        self.failure = self.failure or failure
        self.leave()
        return failure

    def _find_lost(self, window: int, *, is_over: bool) -> tuple[str, str] | None:
        """Return which rank will not come to a barrier and why, and torch's word for that, or None."""
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
            return f"{names} did not come within {self.timeout_seconds:g} s", "the timeout is over"
        return None

    def _name(self, rank: int) -> str:
        return f"rank {self._names[rank]}"


class Peer:
    """A rank's process, and whether it has ended: by a pidfd, which a new process of the same number cannot fool."""

    def __init__(self, pid: int, start_time: int) -> None:
        self.pid = pid
        self._start_time = start_time
        self._fd: int | None = None
        self._ends = select.poll()
        try:
            self._fd = os.pidfd_open(pid)
        except OSError:  # an old kernel, or a sandbox; or it has just ended
            return
        if start_time_of(pid) == start_time:
            self._ends.register(self._fd, select.POLLIN)
        else:
            self.close()

    def has_ended(self) -> bool:
        """Return whether the process is gone, or a zombie."""
        if self._fd is not None:
            return bool(self._ends.poll(0))
        return start_time_of(self.pid) != self._start_time

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def start_time_of(pid: int) -> int:
    """Return when a living process was started, in ticks since boot; -1 for one that has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # its name may hold blanks and brackets
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
    """Make one memory for all ranks of a group. Every rank calls it.

    Args:
        exchange: Reaches all of them.
        rank: This process.
        world_size: How many there are.
        slot_bytes: See `SharedMemory`.
        timeout_seconds: How long a barrier waits for a rank.
        names: What the ranks are called in errors.

    Returns:
        The memory, with its pages there.

    Communication: two exchanges of a few numbers, blocking.

    Raises:
        EnvironmentLacks: Some rank cannot reach rank 0's memory, because it is on another host or in another
            container. All ranks get it.
    """
    memory, without, told = _open_memory(exchange, rank, shared_bytes(world_size, slot_bytes), slot_bytes)
    if memory is None:
        raise EnvironmentLacks(
            f"rank{'s' * (len(without) > 1)} {', '.join(map(str, without))} cannot open the memory of rank 0, but shm "
            "needs all ranks in one Linux host and one container: take ring or hierarchical between hosts"
        )
    peers = [Peer(pid, start_time) for pid, start_time, *_ in told]
    return SharedMemory(memory, peers, rank=rank, slot_bytes=slot_bytes, timeout_seconds=timeout_seconds, names=names)


def open_common_bytes(exchange: Exchange, *, rank: int, world_size: int, num_bytes: int) -> Tensor | None:
    """Make memory of which every rank has a row and sees all. Every rank calls it.

    Args:
        exchange: Reaches all of them.
        rank: This process.
        world_size: How many there are.
        num_bytes: Of a row; the same on all.

    Returns:
        (world_size, at least num_bytes) zeroes of uint8, each row on pages of its own; None, on all ranks, where some
        rank cannot have it.

    Communication: two exchanges of a few numbers, blocking.
    """
    row = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = _open_memory(exchange, rank, world_size * row, row)[0]
    return None if memory is None else torch.frombuffer(memory, dtype=torch.uint8).view(world_size, row)


def _open_memory(
    exchange: Exchange, rank: int, num_bytes: int, agreed: int
) -> tuple[mmap.mmap | None, list[int], list[list[int]]]:
    """Let rank 0 make memory and all map it.

    Returns:
        The memory, or None where some rank cannot map it; the ranks that cannot; process id and start time of all.
    """
    fd, token = _create(num_bytes) if rank == 0 else (-1, 0)
    try:
        told = exchange([os.getpid(), start_time_of(os.getpid()), fd, token, agreed])
        memory = _map(fd, num_bytes, pid=told[0][0], theirs=told[0][2], token=told[0][3])
        has_memory = exchange([int(memory is not None and told[0][4] == agreed)])
    finally:
        if fd >= 0:
            os.close(fd)
    without = [rank for rank, (has,) in enumerate(has_memory) if not has]
    return None if without else memory, without, told


def shared_bytes(world_size: int, slot_bytes: int) -> int:
    """Return the size of the memory: the cells, and a slot per rank in each buffer."""
    return _first_slot(world_size) + NUM_WINDOWS * world_size * slot_bytes


def _first_slot(world_size: int) -> int:
    return -(-world_size * _CELL_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE


def _create(num_bytes: int) -> tuple[int, int]:
    """Return a memory's descriptor and a number that stands behind its end, or (-1, 0) where there can be none."""
    token = secrets.randbits(62)
    fd = -1
    try:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, num_bytes + 8)
        # a process that made it shorter would end all others by SIGBUS
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.pwrite(fd, token.to_bytes(8, sys.byteorder), num_bytes)
    except (OSError, AttributeError):  # no room; no memfd on this system
        if fd >= 0:
            os.close(fd)
        return -1, 0
    return fd, token


def _map(fd: int, num_bytes: int, *, pid: int, theirs: int, token: int) -> mmap.mmap | None:
    """Map the memory, by its own descriptor or by another process's; None if it is not the one with the token."""
    if theirs < 0:
        return None
    opened = -1
    try:
        if fd < 0:
            path = f"/proc/{pid}/fd/{theirs}"
            if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
                return None  # the process of this number on another host: opening its files may do things
            fd = opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.pread(fd, 8, num_bytes) != token.to_bytes(8, sys.byteorder):
            return None
        return mmap.mmap(fd, num_bytes)
    except OSError:
        return None
    finally:
        if opened >= 0:
            os.close(opened)
