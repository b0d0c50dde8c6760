"""Where every rank is, told through shared memory: it can be read while the rank hangs, and after it was killed."""

import mmap
import os
import struct
import time
from dataclasses import dataclass

_BEAT = struct.Struct("<qdqq")
_LINE_BYTES = 64
"""One cache line for each rank, so that none waits for another's."""


PHASES = ("starting", "training", "evaluating", "saving")
"""What a rank may be at. In a phase it has told of more than once, it is known how long it may be silent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """The last thing that a rank told of itself."""

    step: int
    """Steps begun since the start of the run; -1 before training."""
    time: float
    """Of the monotonic clock, which all processes of a host share; 0 before the first."""
    phase: str = PHASES[0]
    count: int = 0
    """How often it told something."""


class Heartbeats:
    """A line of memory per rank: the rank writes its own, the supervisor reads all."""

    def __init__(self, descriptor: int, num_ranks: int) -> None:
        """Map the memory of `open_memory`.

        Args:
            descriptor: Of a file in memory, which may be closed afterwards.
            num_ranks: Lines in it.
        """
        size = num_ranks * _LINE_BYTES
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        self._memory = mmap.mmap(descriptor, size)
        self._count = 0

    def beat(self, rank: int, step: int, phase: str = "training") -> None:
        """Tell that a rank has begun a step, or a part of a phase; about a microsecond."""
        self._count += 1
        told = step, time.monotonic(), PHASES.index(phase), self._count
        _BEAT.pack_into(self._memory, rank * _LINE_BYTES, *told)

    def last(self, rank: int) -> Beat:
        """Return what a rank told last."""
        step, told, phase, count = _BEAT.unpack_from(self._memory, rank * _LINE_BYTES)
        return Beat(step=step if told else -1, time=told, phase=PHASES[phase], count=count)

    def forget(self) -> None:
        """Begin anew: no rank has told anything."""
        self._memory[:] = bytes(len(self._memory))
