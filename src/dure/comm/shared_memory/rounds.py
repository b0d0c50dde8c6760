"""Sending something long through the segment of `SharedMemory` in rounds, one barrier per round."""

from collections.abc import Callable, Sequence

from dure.comm.shared_memory.memory import NUM_WINDOWS, SharedMemory

Phase = Callable[[int, int], None]
"""Function for one phase of a round, called with the start of the round and the window in which it was begun."""


def in_rounds(memory: SharedMemory, total: int, length: int, phases: Sequence[Phase], call: int) -> None:
    """Take all rounds through all phases, with a barrier between each two phases of a round.

    While one round is in its first phase, the one before it is in the second, and so on: every barrier serves them
    all. The first phase may write to the slots of its window, the second may read what the others wrote and write once
    more, the third may read that.

    Args:
        memory: Of all ranks.
        total: How long it is, in any unit. Nothing at all is one barrier.
        length: Of a round; the last one is shorter.
        phases: Two or three.
        call: What is being done, see `SharedMemory.meet`.
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
