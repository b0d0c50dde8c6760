"""A check in a forked process leaves this one as it was."""

import os
from types import SimpleNamespace

import pytest

from dure.api.forked_check import found_in_fork
from dure.errors import EnvironmentLacks, TaskInvalid


def test_faults_are_found_in_another_process():
    seen = SimpleNamespace(changed=False)

    def find():
        seen.changed = True
        return [f"{os.getpid()}", "a fault"]

    process, fault = found_in_fork(find)
    assert int(process) != os.getpid()
    assert fault == "a fault"
    assert not seen.changed


@pytest.mark.parametrize("kind", [TaskInvalid, EnvironmentLacks])
def test_a_refusal_is_raised_here(kind):
    def find():
        raise kind("a sentence")

    with pytest.raises(kind, match="a sentence"):
        found_in_fork(find)


def test_a_check_that_fails_is_left_to_the_ranks(capfd):
    assert found_in_fork(lambda: [str(1 // 0)]) == []
    assert capfd.readouterr() == ("", "")


def test_a_check_that_ends_its_process_has_found_nothing():
    assert found_in_fork(lambda: os._exit(7)) == []
