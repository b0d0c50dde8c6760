"""A group that goes on without some of its ranks: all members learn of a death in the same exchange."""

import os
import signal

import pytest
import torch

from dure.comm.survivors import SurvivorsGroup
from dure.errors import GroupShrank, PeerLost
from tests.comm.gloo_ranks import on_ranks

LEADER = 2


def of(group):
    return SurvivorsGroup(group, leader=LEADER, expendable=(1, 3))


def end_now():
    os.kill(os.getpid(), signal.SIGKILL)


def test_group_when_nobody_dies_then_does_what_a_process_group_does():
    def work(group):
        survivors = of(group)
        total, mine = torch.full((2, 2), survivors.rank + 1.0), torch.full((3,), float(survivors.rank)).bfloat16()
        survivors.all_reduce_sum(total)
        survivors.broadcast([mine, torch.empty(0)], source_rank=1)
        said = survivors.all_gather_json({"rank": survivors.rank, "long": "x" * 100_000 * survivors.rank})
        survivors.barrier()
        return total.tolist(), mine.tolist(), [message["rank"] for message in said]

    assert on_ranks(4, work) == [([[10.0, 10.0]] * 2, [1.0] * 3, [0, 1, 2, 3])] * 4


def test_exchange_when_a_member_dies_then_all_others_raise_in_that_one_and_go_on_renumbered():
    def work(group):
        survivors = of(group)
        survivors.barrier()
        if group.rank == 1:
            end_now()
        with pytest.raises(GroupShrank, match="3 ranks are left"):
            survivors.all_gather_json("lost")
        said = survivors.all_gather_json(survivors.rank)
        answer = survivors.rank, survivors.world_size, survivors.members, said
        survivors.close()
        group.close = lambda: None  # it is left
        return answer

    gone = [0, 2, 3], [0, 1, 2]
    assert on_ranks(4, work) == [(0, 3, *gone), None, (1, 3, *gone), (2, 3, *gone)]


def test_agreement_when_members_die_one_after_the_other_then_ends_with_what_the_living_say():
    def work(group):
        survivors = of(group)
        survivors.barrier()
        if group.rank == 1:
            end_now()
        if group.rank == 3:
            end_now()
        said = survivors.agree(group.rank)
        group.close = group.abandon
        return said

    assert on_ranks(4, work) == [[0, 2], None, [0, 2], None]


def test_exchange_when_one_dies_that_is_needed_then_everybody_raises():
    def work(group):
        survivors = of(group)
        survivors.barrier()  # all are there: rank 0 has the store by which they meet
        if group.rank == 0:
            end_now()
        if group.rank != LEADER:
            os._exit(0)
        group.close = group.abandon
        with pytest.raises(RuntimeError, match="by peer") as caught:
            survivors.barrier()
        return not isinstance(caught.value, PeerLost)

    assert on_ranks(4, work)[LEADER] is True
