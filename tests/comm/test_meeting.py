"""Meeting of ranks that a launcher started."""

import gc
import itertools
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest

from dure.cluster.rank import MeetingPoint, RankInfo
from dure.comm import meeting
from dure.comm.meeting import Meeting
from dure.errors import EnvironmentLacks, PeerLost
from dure.torchcompat.stores import store_at, store_on_socket

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
        heard.append((other.send_to_all_ranks("run", None), other.address))

    follower = threading.Thread(target=follow)
    follower.start()
    first = Meeting(HERE[0], where, timeout_seconds=20)
    said = first.send_to_all_ranks("run", lambda: {"run": "runs/é"})
    follower.join()
    assert [said, heard[0][0]] == [{"run": "runs/é"}] * 2
    assert first.address == heard[0][1]
    assert (first.address.host, first.address.port) == ("127.0.0.1", where.port)


def test_meeting_when_each_rank_says_something_then_all_know_who_said_what():
    where = point()

    def meet(rank: int) -> list[object]:
        return Meeting(HERE[rank], where, timeout_seconds=20).gather("devices", [f"GPU-{rank}", None])

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(meet, range(2))) == [[["GPU-0", None], ["GPU-1", None]]] * 2


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
        first.send_to_all_ranks("run", dict)


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


@pytest.fixture
def launchers() -> Iterator[MeetingPoint]:
    """Serve a store as torchrun's agent does: it outlives the ranks."""
    listener = socket.create_server(("127.0.0.1", 0))
    where = point(port=listener.getsockname()[1], is_served=True)
    store = store_on_socket(listener, timedelta(seconds=20))
    yield where
    del store


def start(where: MeetingPoint, word: str) -> list[tuple[object, object]]:
    """Let both ranks of a start meet, rank 1 a little earlier; return what each has heard, and its prefix."""

    def be(rank: int) -> tuple[object, object]:
        met = Meeting(HERE[rank], where, timeout_seconds=20)
        return met.send_to_all_ranks("run", (lambda: word) if rank == 0 else None), met.address.prefix

    with ThreadPoolExecutor(2) as pool:
        follower = pool.submit(be, 1)
        return [pool.submit(be, 0).result(), follower.result()]


def test_meeting_when_the_launchers_store_has_words_of_the_dead_then_the_living_do_not_read_them(launchers):
    starts = [start(launchers, word) for word in ("first", "second")]
    assert [[heard for heard, _ in ranks] for ranks in starts] == [["first"] * 2, ["second"] * 2]
    assert [len({prefix for _, prefix in ranks}) for ranks in starts] == [1, 1]
    assert starts[0][0][1] != starts[1][0][1]


def test_meeting_when_a_rank_died_before_it_was_answered_then_the_next_start_meets_all_the_same(launchers):
    with pytest.raises(PeerLost, match=r"waited 0\.2 s in vain for rank 0"):
        Meeting(HERE[1], launchers, timeout_seconds=0.2)
    with pytest.raises(PeerLost, match=r"waited 0\.2 s in vain for the other ranks"):
        Meeting(HERE[0], launchers, timeout_seconds=0.2).send_to_all_ranks("run", lambda: "nobody")
    assert [heard for heard, _ in start(launchers, "said")] == ["said"] * 2


def test_word_when_left_by_an_earlier_start_then_is_recalled(launchers):
    first, second = (Meeting(HERE[0], launchers, timeout_seconds=5) for _ in range(2))
    assert first.recall("run") is None
    first.remember("run", "runs/one")
    assert second.recall("run") == "runs/one"
    # torchrun's agents of two jobs may share a store
    assert Meeting(HERE[0], replace(launchers, job="another"), timeout_seconds=5).recall("run") is None


def test_store_of_a_start_when_the_launcher_serves_another_then_nobody_has_written_to_it(launchers):
    def be(rank: int) -> object:
        met = Meeting(HERE[rank], launchers, timeout_seconds=20)
        found = met.store_of_this_start()
        store = store_at(found.host, found.port, timedelta(seconds=20))
        store.add("arrived", 1)
        met.leave()
        return found.port, store.add("arrived", 0)

    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            ports, counts = zip(*pool.map(be, range(2)), strict=True)
        assert len({*ports, launchers.port}) == 2
        assert counts[0] == 2
