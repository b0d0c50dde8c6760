"""A check in a forked process leaves this one as it was."""

import os
from types import SimpleNamespace

import pytest

from dure.api.forked_check import found_in_fork
from dure.errors import TaskInvalid


def test_faults_are_found_in_another_process_without_devices():
    seen = SimpleNamespace(changed=False)

    def find():
        seen.changed = True
        return [f"{os.getpid()}", f"devices: {os.environ['CUDA_VISIBLE_DEVICES']}"]

    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    process, devices = found_in_fork(find)
    assert int(process) != os.getpid()
    assert devices == "devices: "
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
    assert not seen.changed


def test_a_refusal_of_the_task_is_raised_here():
    def find():
        raise TaskInvalid("a sentence")

    with pytest.raises(TaskInvalid, match="a sentence"):
        found_in_fork(find)


def test_a_check_that_ends_its_process_has_found_nothing():
    assert found_in_fork(lambda: os._exit(7)) == []
