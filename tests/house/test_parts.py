"""Parts of the slow tests: together they are all of them, and each has cases of every test."""

import argparse

import pytest

from tests.parts import part, select


class Case:
    """A collected test, with a marker."""

    def __init__(self, name: str, marker: str | None) -> None:
        self.name, self._marker = name, marker

    def get_closest_marker(self, name: str) -> bool:
        return name == self._marker


CASES = [
    Case("quick", None),
    *(Case(f"slow-{number}", "slow") for number in range(7)),
    Case("quick-too", None),
    *(Case(f"fault-{number}", "faults") for number in range(3)),
]


def test_parts_together_are_all_tests_and_each_test_is_in_one_of_them_once():
    parts = [select(CASES, number, 3)[0] for number in (1, 2, 3)]
    quick = [case for case in CASES if case.name.startswith("quick")]
    assert all(set(quick) <= set(each) for each in parts)
    chosen = [case.name for each in parts for case in each if case not in quick]
    assert sorted(chosen) == sorted(case.name for case in CASES if case not in quick)
    assert all(set(kept) | set(others) == set(CASES) for kept, others in (select(CASES, n, 3) for n in (1, 2, 3)))


def test_each_part_has_cases_of_a_test_that_has_as_many_as_there_are_parts():
    for number in (1, 2, 3):
        names = [case.name.partition("-")[0] for case in select(CASES, number, 3)[0]]
        assert {"slow", "fault"} <= set(names)


@pytest.mark.parametrize("text", ["", "2", "0/3", "4/3", "a/b", "1/0", "-1/3"])
def test_part_when_it_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="second of three"):
        part(text)
