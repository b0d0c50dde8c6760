import pytest
import torch
import torch.distributed as dist

from dure.comm.algorithms import thread_wire
from dure.comm.algorithms.thread_wire import on_threads
from dure.comm.algorithms.wire import Message, Wire
from dure.errors import PeerLost
from dure.failures.report import is_peer_lost
from tests.comm.gloo_ranks import on_ranks


def say_everything(wire):
    """Send around a ring of three in every way there is; return what came in and what was counted."""
    following, previous = (wire.rank + 1) % 3, (wire.rank - 1) % 3
    mine = torch.tensor([wire.rank, 10 + wire.rank], dtype=torch.float64)
    heard = [torch.empty_like(mine) for _ in range(4)]
    wire.exchange(mine, following, heard[0], previous)
    if wire.rank == 0:
        wire.send(mine[1:], 1)
    elif wire.rank == 1:
        wire.recv(heard[1][1:], 0)
    two = wire.start([(mine, following), (mine[:1], previous)], [(heard[2], previous), (heard[3][:1], following)])
    two.wait()
    return [heard[0].tolist(), heard[1][1].item(), heard[2].tolist(), heard[3][0].item()], wire.sent_bytes


@pytest.mark.parametrize("run", ["gloo", "threads"])
def test_wire_carries_messages_and_counts_their_bytes(run):
    answers = on_ranks(3, lambda group: say_everything(Wire())) if run == "gloo" else on_threads(3, say_everything)
    for rank, (heard, sent_bytes) in enumerate(answers):
        before, after = (rank - 1) % 3, (rank + 1) % 3
        assert heard[0] == heard[2] == [before, 10 + before]
        assert heard[3] == after
        assert sent_bytes == 16 + 16 + 8 + 8 * (rank == 0)
    assert answers[1][0][1] == 10


def stream(wire):
    """Have many messages under way in both directions, and wait for the last one first."""
    peer = 1 - wire.rank
    landing = torch.zeros(20, 1000)
    transfers = [
        wire.start([(torch.full((1000,), float(number)), peer)], [(landing[number], peer)]) for number in range(20)
    ]
    for transfer in [*reversed(transfers), *transfers]:
        transfer.wait()  # the second time there is nothing to wait for
    return landing[:, 0].tolist(), landing[:, -1].tolist()


@pytest.mark.parametrize("run", ["gloo", "threads"])
def test_messages_between_two_ranks_keep_their_order(run):
    answers = on_ranks(2, lambda group: stream(Wire())) if run == "gloo" else on_threads(2, stream)
    assert answers == [([*range(20)], [*range(20)])] * 2


def send_nothing(group):
    wire = Wire()
    wire.send(torch.empty(0), 1 - wire.rank)  # nobody receives
    wire.recv(torch.empty(0), 1 - wire.rank)
    wire.start([], []).wait()
    return wire.sent_bytes


def test_tensors_without_elements_send_nothing_and_wait_for_nobody():
    assert on_ranks(2, send_nothing) == [0, 0]


def in_a_group(group):
    of_two = dist.new_group([0, 2])
    if group.rank == 1:
        return None
    log: list[Message] = []
    wire = Wire(of_two, hosts=[4, 5], log=log)
    heard = torch.empty(2)
    wire.mark("hello", 3)
    wire.exchange(torch.arange(6.0)[2:4], 1 - wire.rank, heard, 1 - wire.rank)
    return wire.rank, wire.world_size, wire.hosts, heard.tolist(), log


def test_wire_of_a_group_has_its_ranks_and_logs_which_elements_went_where():
    answers = on_ranks(3, in_a_group)
    assert answers[1] is None
    rank, world_size, hosts, heard, log = answers[2]
    assert (rank, world_size, hosts, heard) == (1, 2, (4, 5), [2.0, 3.0])
    assert log == [
        Message(phase="hello", step=3, source=1, destination=0, start=2, num_elements=2, num_bytes=8, values=(2.0, 3.0))
    ]
    assert log[0].end == 4


def test_wire_among_some_ranks_numbers_them_anew_and_counts_on_the_whole_one():
    log: list[Message] = []

    def work(wire):
        if wire.rank == 1:
            return None
        few = wire.among([3, 0, 2], "few: ")
        few.mark("round")
        heard = torch.empty(1)
        few.exchange(torch.tensor([float(wire.rank)]), (few.rank + 1) % 3, heard, (few.rank - 1) % 3)
        return few.rank, few.world_size, few.hosts, heard.item(), few.sent_bytes, wire.sent_bytes

    answers = on_threads(4, work, hosts=[5, 6, 7, 8], log=log)
    assert answers == [(1, 3, (8, 5, 7), 3.0, 4, 4), None, (2, 3, (8, 5, 7), 0.0, 4, 4), (0, 3, (8, 5, 7), 2.0, 4, 4)]
    assert {(m.phase, m.source, m.destination) for m in log} == {
        ("few: round", 3, 0),
        ("few: round", 0, 2),
        ("few: round", 2, 3),
    }


def test_hosts_that_are_not_one_per_rank_are_refused():
    with pytest.raises(ValueError, match="hosts names 3 ranks, but the group has 2"):
        on_threads(2, lambda wire: None, hosts=[0, 0, 1])


def test_thread_wire_when_a_tensor_is_overwritten_on_its_way_then_it_says_so():
    def work(wire):
        mine, heard = torch.ones(2), torch.empty(2)
        transfer = wire.start([(mine, 1 - wire.rank)], [(heard, 1 - wire.rank)])
        mine.add_(1)
        transfer.wait()

    with pytest.raises(RuntimeError, match="overwritten while it was being sent"):
        on_threads(2, work)


def test_thread_wire_when_a_tensor_is_read_before_the_wait_then_it_holds_no_old_values():
    def work(wire):
        heard = torch.zeros(2, dtype=torch.int64)
        transfer = wire.start([(torch.ones_like(heard), 1 - wire.rank)], [(heard, 1 - wire.rank)])
        early = heard.tolist()
        transfer.wait()
        return early, heard.tolist()

    assert on_threads(2, work) == [([2**63 - 1] * 2, [1, 1])] * 2


def test_thread_wire_when_both_sides_cut_differently_then_it_says_so():
    def work(wire):
        if wire.rank == 0:
            wire.send(torch.ones(3), 1)
        else:
            wire.recv(torch.ones(2), 0)

    with pytest.raises(RuntimeError, match=r"rank 0 sent 3 elements of .* where 2 of .* were expected"):
        on_threads(2, work)


def test_thread_wire_when_a_rank_ends_without_a_message_that_is_waited_for_then_it_says_so():
    with pytest.raises(PeerLost, match="rank 0 ended while rank 1 waited"):
        on_threads(2, lambda wire: wire.rank and wire.recv(torch.empty(1), 0))


def test_thread_wire_when_ranks_wait_for_each_other_then_it_says_so(monkeypatch):
    monkeypatch.setattr(thread_wire, "TIMEOUT_SECONDS", 0.1)
    with pytest.raises(PeerLost, match=r"sent nothing to rank . for 0.1 s|ended while rank . waited"):
        on_threads(2, lambda wire: wire.recv(torch.empty(1), 1 - wire.rank))


def lose_a_peer(group):
    wire = Wire()
    if wire.rank == 1:
        raise SystemExit
    wire.recv(torch.empty(4), 1)


def test_wire_when_the_peer_has_gone_then_its_loss_is_told(capfd):
    lost, gone = on_ranks(2, lose_a_peer)
    assert gone is None
    assert is_peer_lost(lost), lost
    assert "lose_a_peer" in capfd.readouterr().err


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device. Its values are in the memory of the host, so they can be looked at."""

    device = torch.device("cuda")

    def cpu(self):
        return self.as_subclass(torch.Tensor).clone()


def carry_from_devices(group):
    """Send and receive tensors of a device over gloo, and note what gloo was given."""
    wire, given = Wire(), []

    def noted(call):
        def noting(tensor, **options):
            given.append(type(tensor))
            return call(tensor, **options)

        return noting

    dist.isend, dist.irecv = noted(dist.isend), noted(dist.irecv)  # in this rank's process only
    mine = torch.full((3,), wire.rank + 1.0).as_subclass(OnDevice)
    landing = torch.zeros(3).as_subclass(OnDevice)
    transfer = wire.start([(mine, 1 - wire.rank)], [(landing, 1 - wire.rank)])
    transfer.wait()
    transfer.wait()
    return landing.tolist(), given == [torch.Tensor] * 2


def test_tensors_of_a_device_when_the_backend_is_gloo_then_they_go_through_host_memory():
    # gloo takes an address of a device for one of the host: it reads what is there, or the process ends
    assert on_ranks(2, carry_from_devices) == [([2.0] * 3, True), ([1.0] * 3, True)]
