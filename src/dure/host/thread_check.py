"""Measurement of whether a rank's threads wait for cores kept busy by other work."""

import time

import torch

_ELEMENTS = 2**16
"""Elements of an operation, for which torch uses two threads, and which takes microseconds."""
_CALLS = 50
_FEWEST_CALLS = 10
_ROUNDS = 10
_MOST_SECONDS = 0.1
_TOO_SLOW = 5.0
"""Slowdown compared with one thread that is reported."""


def slowdown_of_threads() -> float | None:
    """Return the slowdown of small operations compared with one thread, if it is excessive.

    The threads of an operation wait for the slowest. If one of them has no core, an operation of microseconds takes a
    time slice of the system. The slowest call is left out, because anything may interrupt one. The number of threads is
    restored. The measurement takes about ten milliseconds.

    Returns:
        The ratio; None if it is small, or there is one thread.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        return None
    x, out = torch.ones(_ELEMENTS), torch.empty(_ELEMENTS)
    seconds: dict[int, list[float]] = {1: [], num_threads: []}
    try:
        for _ in range(_ROUNDS):
            for number, each in seconds.items():
                torch.set_num_threads(number)
                torch.add(x, x, out=out)  # the start of threads must not be measured
                for _ in range(_CALLS):
                    began = time.perf_counter()
                    torch.add(x, x, out=out)
                    each.append(time.perf_counter() - began)
                    if len(each) >= _FEWEST_CALLS and sum(each) > _MOST_SECONDS:
                        break
            if sum(seconds[num_threads]) > _MOST_SECONDS:
                break
    finally:
        torch.set_num_threads(num_threads)
    ratio = _mean_without_slowest(seconds[num_threads]) / _mean_without_slowest(seconds[1])
    return ratio if ratio > _TOO_SLOW else None


def _mean_without_slowest(seconds: list[float]) -> float:
    return (sum(seconds) - max(seconds)) / (len(seconds) - 1)
