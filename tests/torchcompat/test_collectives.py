"""Process groups and their collectives."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dure.torchcompat.collectives import (
    AllgatherOptions,
    all_gather_single,
    give_gloo,
    group_timeout_seconds,
    reduce_scatter_single,
)
from tests.torchcompat.conftest import TIMEOUT
from tests.torchcompat.fresh_interpreter import run_python


@pytest.mark.slow
def test_abort_then_no_process_group_is_left() -> None:
    code = (
        "import torch.distributed as dist\n"
        "from dure.torchcompat.collectives import abort_process_groups\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.new_group()\n"
        "abort_process_groups()\n"
        "print(dist.is_initialized())\n"
    )
    assert run_python(code) == "False\n"


def test_group_timeout_when_it_was_set_then_that_is_it(solo_group: None) -> None:
    assert group_timeout_seconds() == TIMEOUT.total_seconds()
    assert group_timeout_seconds(dist.new_group(timeout=timedelta(seconds=3))) == 3.0


def test_give_gloo_when_a_group_of_python_overrides_a_call_then_gloo_makes_all_others() -> None:
    class Group(dist.ProcessGroup):
        def barrier(self, opts=None):
            return "mine"

    group, number, options = Group(0, 1), torch.ones(2), AllgatherOptions()
    plain = give_gloo(group, dist.HashStore(), 0, 1, TIMEOUT)
    assert group.barrier() == "mine"
    plain.barrier().wait()
    group.allreduce([number]).wait()
    group.allgather([[gathered := torch.zeros(2)]], [number], options).wait()
    assert gathered.tolist() == [1.0, 1.0]
    assert options.timeout.total_seconds() < 0  # nothing said
    assert group_timeout_seconds(group) == TIMEOUT.total_seconds()


@pytest.mark.usefixtures("solo_group")
def test_collectives_when_called_by_their_new_names_then_no_version_warns() -> None:
    gathered, scattered = torch.zeros(2), torch.zeros(2)
    all_gather_single(gathered, torch.tensor([1.0, 2.0]))
    reduce_scatter_single(scattered, torch.tensor([3.0, 4.0]))
    assert gathered.tolist() == [1, 2]
    assert scattered.tolist() == [3, 4]
