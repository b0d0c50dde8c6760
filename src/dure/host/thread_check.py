"""Measurement of whether a rank's threads wait for cores that other work keeps busy."""

import time

import torch

_ELEMENTS = 2**16
"""Size of an operation: torch divides it over two threads, and it takes microseconds."""
_CALLS = 50
_ROUNDS = 10
_MOST_SECONDS = 0.1
_TOO_SLOW = 5.0
"""Times as long as with one thread: an operation that is interrupted now and then stays far below."""


def slowdown_of_threads() -> float | None:
    """Return how many times as long small operations take as with one thread, if that is far too long.

    Threads of one operation wait for the slowest: where one of them has no core, an operation of microseconds takes a
    time slice of the system. The number of threads is left as it was. It takes about ten milliseconds.

    Returns:
        The ratio; None where it is small, or there is one thread.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        return None
    x, out = torch.ones(_ELEMENTS), torch.empty(_ELEMENTS)
    seconds = {1: 0.0, num_threads: 0.0}
    calls = dict.fromkeys(seconds, 0)
    try:
        for _ in range(_ROUNDS):
            for number in seconds:
                torch.set_num_threads(number)
                torch.add(x, x, out=out)  # threads that have to be started are no measure
                began = time.perf_counter()
                for _ in range(_CALLS):
                    torch.add(x, x, out=out)
                    calls[number] += 1
                    if time.perf_counter() - began > _MOST_SECONDS:
                        break
                seconds[number] += time.perf_counter() - began
            if seconds[num_threads] > _MOST_SECONDS:
                break
    finally:
        torch.set_num_threads(num_threads)
    ratio = (seconds[num_threads] / calls[num_threads]) / (seconds[1] / calls[1])
    return ratio if ratio > _TOO_SLOW else None
