"""Transfer of long data through the segment of `SharedMemory` in rounds, with one barrier per round."""

from collections.abc import Callable, Sequence

from dure.comm.shared_memory.memory import NUM_WINDOWS, SharedMemory

Phase = Callable[[int, int], None]
"""Function for one phase of a round, called with the start of the round and the window in which it was begun."""


def in_rounds(memory: SharedMemory, total: int, length: int, phases: Sequence[Phase], call: int) -> None:
    """Run all phases of all rounds, with a barrier between consecutive phases of a round.

    While one round is in its first phase, the one before it is in the second, and so on: every barrier serves all of
    them. The first phase may write to the slots of its window. The second may read what the others wrote, and write
    once more, which the third may read.

    Args:
        memory: Memory of all ranks.
        total: Total length, in any unit. A length of 0 is one barrier.
        length: Length of a round; the last one may be shorter.
        phases: Two or three phases.
        call: Number of the call, see `SharedMemory.meet`.
    """
    assert len(phases) <= NUM_WINDOWS
    if total == 0:
        memory.meet(call)
        return
    num_rounds, last_delay, first_window = -(-total // length), len(phases) - 1, memory.window
    for turn in range(num_rounds + last_delay):
        for delay, phase in enumerate(phases):
            if 0 <= turn - delay < num_rounds:
                phase((turn - delay) * length, first_window + turn - delay)
        if turn < num_rounds + last_delay - 1:
            memory.meet(call)
