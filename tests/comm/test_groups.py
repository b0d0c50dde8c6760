import os
import time

import pytest
import torch
import torch.distributed as dist

from dure.comm import groups
from dure.comm.groups import Solo
from dure.errors import PeerLost, SpecInvalid
from dure.failures.report import is_peer_lost
from tests.comm.gloo_ranks import on_ranks


def everything(group):
    number = torch.tensor([group.rank + 1.0, 10.0], dtype=torch.float64)
    group.all_reduce_sum(number)
    sent = [torch.full((2,), float(group.rank)), torch.tensor(group.rank)]
    group.broadcast(sent, source_rank=1)
    said = group.all_gather_json({"rank": group.rank, "text": "두레" * group.rank, "inf": float("inf")})
    group.barrier()
    return group.rank, group.world_size, number.tolist(), [t.tolist() for t in sent], said


def test_group_of_three_ranks_reduces_broadcasts_and_gathers():
    answers = on_ranks(3, everything)
    for rank, (own, world_size, number, sent, said) in enumerate(answers):
        assert (own, world_size) == (rank, 3)
        assert number == [6.0, 30.0]
        assert sent == [[1.0, 1.0], 1]
        assert [message["text"] for message in said] == ["", "두레", "두레두레"]
        assert said[2]["inf"] == float("inf")


def test_solo_answers_as_a_group_of_one_would():
    group = Solo()
    number = torch.tensor([2.0])
    group.all_reduce_sum(number)
    group.broadcast([number])
    group.barrier()
    assert number.item() == 2.0
    assert group.all_gather_json({"a": (1, 2)}) == [{"a": [1, 2]}]
    group.close()


def broadcast_odd_tensors(group):
    """Broadcast a column, and a tensor of the host over a backend that takes tensors of its device only."""
    column = torch.full((3, 2), float(group.rank))
    group.broadcast([column[:, 1]], source_rank=1)
    given = []
    # a device of another name: tensors are copied on their way to it, as to a GPU
    elsewhere = groups.ProcessGroup(torch.device("cpu", 0))
    elsewhere.backend, elsewhere._message_device = "nccl", torch.device("cpu", 0)
    send = dist.broadcast

    def noted(tensor, **options):
        given.append(tensor.data_ptr())
        send(tensor, **options)

    dist.broadcast = noted  # in this rank's process only
    number = torch.tensor([group.rank])
    elsewhere.broadcast([number], source_rank=1)
    return column.tolist(), number.item(), given != [number.data_ptr()]


def test_broadcast_of_odd_tensors_then_they_go_through_memory_that_the_backend_takes():
    for rank, (column, number, is_moved) in enumerate(on_ranks(2, broadcast_odd_tensors)):
        assert column == [[rank, 1.0]] * 3
        assert number == 1
        assert is_moved


@pytest.mark.parametrize(("is_of_devices", "left"), [(True, ["abort"]), (False, ["destroy"])])
def test_abandon_then_nccl_is_aborted_for_its_orderly_end_waits_for_other_ranks(is_of_devices, left, monkeypatch):
    ends = []
    monkeypatch.setattr(groups, "abort_process_groups", lambda: ends.append("abort"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: ends.append("destroy"))
    group = object.__new__(groups.ProcessGroup)
    group._is_of_devices, group.process_group = is_of_devices, None
    group.abandon()
    assert ends == left


def leave_early(group):
    if group.rank == 1:
        os._exit(3)
    group.all_reduce_sum(torch.zeros(1))


def test_the_loss_of_a_peer_is_told_from_a_cause(capfd):
    error, dead = on_ranks(2, leave_early)
    assert dead is None
    assert is_peer_lost(error), error
    assert is_peer_lost(PeerLost("rank 1 went away"))
    assert not is_peer_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_peer_lost(SpecInvalid(["timed out waiting"]))
    assert "Traceback" in capfd.readouterr().err


def be_late(group):
    if group.rank == 1:
        time.sleep(3)
        return
    group.all_reduce_sum(torch.zeros(1))
    return


def test_a_collective_that_takes_longer_than_the_timeout_is_an_error(capfd):
    late = on_ranks(2, be_late, timeout_seconds=1.0)[0]
    assert is_peer_lost(late), late
    capfd.readouterr()
