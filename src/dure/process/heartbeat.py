"""Heartbeats of the ranks in shared memory, readable while a rank hangs and after it was killed."""

import mmap
import os
import struct
import time
from dataclasses import dataclass

_BEAT = struct.Struct("<qdqqq")
_PACE = struct.Struct("<qdd")
_PACES_BYTES = 64
"""Offset in bytes of a rank's paces in its memory; there is one for each phase."""
_LINE_BYTES = 192
"""Bytes of each rank's memory: whole cache lines, so that no rank waits for another's."""


PHASES = ("starting", "training", "evaluating", "saving", "leaving")
"""Phases of a rank. The usual silence in a phase is learned from its heartbeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """Last heartbeat of a rank."""

    step: int
    """Steps begun since the start of the run; -1 before training."""
    time: float
    """Time on the monotonic clock, which all processes of a host share; 0 before the first."""
    phase: str = PHASES[0]
    count: int = 0
    """Number of heartbeats so far."""
    sequence: int = -1
    """Number of collectives requested from the group of all ranks; -1 if it is not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Statistics of a rank's silences between two heartbeats, by phase."""

    count: int = 0
    seconds: float = 0.0
    """Sum of the silences in seconds."""
    longest_seconds: float = 0.0


class Heartbeats:
    """Shared memory with one line per rank: a rank writes its own, the supervisor reads all."""

    def __init__(self, descriptor: int, num_ranks: int) -> None:
        """Map a file in memory.

        Args:
            descriptor: Descriptor of the file, which may be closed afterwards.
            num_ranks: Lines in it.
        """
        size = num_ranks * _LINE_BYTES
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        self._memory = mmap.mmap(descriptor, size)
        self._count = 0
        self._last_time = 0.0
        self._last_phase = 0
        self._paces = [(0, 0.0, 0.0)] * len(PHASES)

    def beat(self, rank: int, step: int, phase: str = "training", sequence: int = -1) -> None:
        """Record that a rank has begun a step, or a part of a phase; takes about two microseconds.

        Args:
            rank: Rank of the line, always the same.
            step: Steps begun.
            phase: One of `PHASES`.
            sequence: Number of the last collective, from `torchcompat.calls.SequenceNumber`.
        """
        now, number, line = time.monotonic(), PHASES.index(phase), rank * _LINE_BYTES
        if self._count:
            count, total, longest = self._paces[self._last_phase]
            seconds = now - self._last_time
            pace = count + 1, total + seconds, max(longest, seconds)
            self._paces[self._last_phase] = pace
            _PACE.pack_into(self._memory, line + _PACES_BYTES + self._last_phase * _PACE.size, *pace)
        self._count += 1
        self._last_time, self._last_phase = now, number
        _BEAT.pack_into(self._memory, line, step, now, number, self._count, sequence)

    def last(self, rank: int) -> Beat:
        """Return the last heartbeat of a rank."""
        step, written_at, phase, count, sequence = _BEAT.unpack_from(self._memory, rank * _LINE_BYTES)
        if not written_at:
            return Beat(step=-1, time=0.0)
        return Beat(step=step, time=written_at, phase=PHASES[phase], count=count, sequence=sequence)

    def paces(self, rank: int) -> dict[str, Pace]:
        """Return a rank's pace in each phase."""
        begin = rank * _LINE_BYTES + _PACES_BYTES
        entries = _PACE.iter_unpack(self._memory[begin : begin + len(PHASES) * _PACE.size])
        return {
            phase: Pace(count=count, seconds=seconds, longest_seconds=longest)
            for phase, (count, seconds, longest) in zip(PHASES, entries, strict=True)
        }

    def forget(self) -> None:
        """Clear all entries: no rank has written any."""
        self._memory[:] = bytes(len(self._memory))
