"""How ranks that a launcher started find each other."""

import gc
import itertools
import socket
import threading
from collections.abc import Iterator

import pytest

from dure.comm import meeting
from dure.comm.meeting import Meeting
from dure.errors import EnvironmentLacks, PeerLost
from dure.rank import MeetingPoint, RankInfo

HERE = [RankInfo(rank=rank, local_rank=rank, world_size=2, local_world_size=2) for rank in range(2)]
ON_TWO_HOSTS = [RankInfo(rank=rank, node_rank=rank, world_size=2) for rank in range(2)]
NOBODYS = "198.51.100.7"
"""An address for documentation: of no host."""


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the stores that are served: in use, they live as long as the process."""
    monkeypatch.setattr(meeting, "_served", {})
    monkeypatch.setattr(meeting, "_numbers", itertools.repeat(0))  # ranks are threads of this one process
    monkeypatch.setattr(meeting, "_PORT_PATIENCE_SECONDS", 0.05)
    yield
    meeting._served.clear()
    gc.collect()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def point(host: str = "127.0.0.1", port: int = 0, **fields: object) -> MeetingPoint:
    return MeetingPoint(host=host, port=port or free_port(), **fields)


def test_meeting_when_rank_0_says_something_then_all_hear_it():
    where, heard = point(), []

    def follow() -> None:
        other = Meeting(HERE[1], where, timeout_seconds=20)
        heard.append((other.tell_all("run", None), other.address))

    follower = threading.Thread(target=follow)
    follower.start()
    first = Meeting(HERE[0], where, timeout_seconds=20)
    said = first.tell_all("run", lambda: {"run": "runs/é"})
    follower.join()
    assert [said, heard[0][0]] == [{"run": "runs/é"}] * 2
    assert first.address == heard[0][1]
    assert (first.address.host, first.address.port) == ("127.0.0.1", where.port)


def test_meeting_when_all_ranks_are_on_one_host_then_the_store_listens_on_loopback_alone():
    where = point("localhost")
    found = Meeting(HERE[0], where, timeout_seconds=5)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", where.port), timeout=2)
    assert found.address.host in ("127.0.0.1", "::1")


def test_meeting_when_nobody_comes_then_both_sides_say_who_is_missing():
    with pytest.raises(PeerLost, match=r"rank 1 of 2 waited 0.2 s in vain for rank 0 at 127.0.0.1"):
        Meeting(HERE[1], point(), timeout_seconds=0.2)
    first = Meeting(HERE[0], point(), timeout_seconds=0.2)
    with pytest.raises(PeerLost, match=r"rank 0 of 2 waited 0.2 s in vain for the other ranks"):
        first.tell_all("run", dict)


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (NOBODYS, "which is no address of its host .* set MASTER_ADDR to the host of rank 0"),
        ("no such host", "that name is not known here .* set MASTER_ADDR"),
        ("127.0.0.1", "is 127.0.0.1 on rank 0's host, where ranks of other hosts cannot reach it: set MASTER_ADDR"),
    ],
)
def test_meeting_when_the_address_cannot_be_then_the_cure_is_said(host, said):
    with pytest.raises(EnvironmentLacks, match=said):
        Meeting(ON_TWO_HOSTS[0], point(host), timeout_seconds=5)


def test_meeting_when_the_port_is_taken_then_that_is_said_and_where_it_came_from():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = point(port=taken.getsockname()[1], is_port_given=False)
        with pytest.raises(EnvironmentLacks, match=r"which comes from the job's number .*: set MASTER_PORT"):
            Meeting(HERE[0], where, timeout_seconds=5)


def test_meeting_when_a_script_trains_twice_then_the_store_is_served_once(monkeypatch):
    where = point()
    monkeypatch.setattr(meeting, "_numbers", itertools.count())
    both = [Meeting(HERE[0], where, timeout_seconds=5).address.prefix for _ in range(2)]
    assert both == ["dure/0/0", "dure/0/1"]
