"""Measurement of whether a rank's threads wait for cores kept busy by other work."""

import time

import torch

_ELEMENTS = 2**16
"""Elements of an operation, for which torch uses two threads, and which takes microseconds."""
_CALLS = 50
_ROUNDS = 10
_MOST_SECONDS = 0.1
_TOO_SLOW = 5.0
"""Slowdown compared with one thread that is reported; an occasional interruption stays far below."""


def slowdown_of_threads() -> float | None:
    """Return the slowdown of small operations compared with one thread, if it is excessive.

    The threads of an operation wait for the slowest. If one of them has no core, an operation of microseconds takes a
    time slice of the system. The number of threads is restored. The measurement takes about ten milliseconds.

    Returns:
        The ratio; None if it is small, or there is one thread.
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
                torch.add(x, x, out=out)  # the start of threads must not be measured
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
