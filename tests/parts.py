"""Parts of the slow and the fault tests: every n-th of them, so that a run of CI has some of all kinds (`--part`)."""

import argparse

import pytest

LONG = ("slow", "faults")
"""Markers of the tests that are divided; all others are in every part."""


def part(text: str) -> tuple[int, int]:
    """Parse `2/3`, the second part of three.

    Raises:
        argparse.ArgumentTypeError: It is no such text, or there is no such part.
    """
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part: 2/3 is the second of three")
    return int(number), int(count)


def select(items: list[pytest.Item], number: int, count: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests of a part, and the others.

    Cases of one test stand side by side, so that a test with as many cases as there are parts is in each of them.
    """
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    num_long = 0
    for item in items:
        is_long = any(item.get_closest_marker(marker) for marker in LONG)
        num_long += is_long
        (others if is_long and num_long % count != number % count else kept).append(item)
    return kept, others
