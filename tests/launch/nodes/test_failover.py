"""A node that cannot reach its leader: it comes back, leads, or ends, and each for a reason that it has seen."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dure.launch.nodes import failover
from dure.launch.nodes import leader_lease as lease_module
from dure.launch.nodes.channel import ChannelListener
from dure.launch.nodes.failover import FailoverResult, LeaderFailover
from dure.launch.nodes.leader_lease import Lease
from dure.launch.nodes.member import Member
from dure.launch.nodes.messages import Join, Round, Welcome
from dure.launch.nodes.peers import Nodes
from dure.launch.nodes.secret import read_secret
from dure.process.round_orders import RoundPlan
from tests.launch.nodes.one_read import answer_together

CONNECT_SECONDS = failover._CONNECT_SECONDS


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 0.02)
    for name, seconds in (("STALE", 0.4), ("_GONE", 0.3), ("_CONNECT", 0.2), ("_LOOK", 0.01)):
        monkeypatch.setattr(failover, f"{name}_SECONDS", seconds)


@dataclass
class CutOff:
    """Node 1 of a run, when it has lost its leader."""

    run: Path
    ended: str | None = None
    told: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.run.mkdir()
        members = [
            Member(node_rank=rank, host=f"host{rank}", address=f"127.0.0.{rank + 1}", num_ranks=1) for rank in range(2)
        ]
        self.leader = Lease(self.run)
        # what is bound and does not listen, or has a full backlog, answers as little as a host behind a cut cable
        self.deaf = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.callers = [socket.create_connection(self.deaf.getsockname())]
        assert self.leader.claim(0, "127.0.0.1", self.deaf.getsockname()[1])
        self.leader.renew(3)
        read_secret(self.run / "secret", host="x", may_make=True)
        self.nodes = Nodes(members[1], members, {}, fewest=1, most=2)
        self.nodes.lease = Lease(self.run)
        self.nodes.lease.look()

    def go(self, seconds: float = 5.0, until: Callable[[], object] = lambda: False) -> FailoverResult | None:
        with self.deaf:
            try:
                return LeaderFailover(
                    join=Join(num_nodes="1:2", node_rank=1, host="host1", num_ranks=1, facts={}),
                    folder=str(self.run),
                    secret_file=self.run / "secret",
                    port=0,
                    timeout_seconds=seconds,
                    how_ended=lambda: self.ended,
                    on_wait=self.told.append,
                    on_lead=lambda: None,
                ).go(self.nodes, lambda: bool(until()))
            finally:
                for caller in self.callers:
                    caller.close()


@pytest.fixture
def cut_off(tmp_path) -> CutOff:
    return CutOff(tmp_path / "run")


@contextmanager
def renewed(lease: Lease, then: Callable[[], None] = lambda: None, after: float = 1.2) -> Iterator[None]:
    """Let the leader go on for a while beside the test."""

    def lead() -> None:
        deadline = time.monotonic() + after
        while time.monotonic() < deadline:
            lease.renew(3)
            time.sleep(0.01)
        then()

    thread = threading.Thread(target=lead)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_node_when_knocks_are_not_answered_while_the_lease_moves_then_it_waits_as_long_as_it_was_told(cut_off):
    with renewed(cut_off.leader, after=1.6):
        began = time.monotonic()
        assert cut_off.go(1.5) is None
        assert time.monotonic() - began >= 1.5
    assert cut_off.nodes.lost.startswith(
        "nothing is heard of node 0 (host0, 127.0.0.1), which still leads the run: the network between it and this "
        "node is cut or too slow; the run could not be reached again within 1.5 s (--rendezvous-timeout)"
    )
    (told,) = cut_off.told
    assert "the run goes on without this node, which tries to come back for 1.5 s (--rendezvous-timeout)" in told


def test_node_when_the_leader_gives_up_its_lease_then_it_says_how_the_run_ended(cut_off):
    cut_off.ended = "the run was completed"
    with renewed(cut_off.leader, cut_off.leader.give_up):
        assert cut_off.go() is None
    assert cut_off.nodes.lost.endswith("; meanwhile the run was completed")


def test_node_when_the_lease_is_gone_and_no_record_says_so_then_the_run_was_ended_before_it_trained(cut_off):
    cut_off.leader.give_up()
    assert cut_off.go() is None
    assert cut_off.nodes.lost.endswith("; meanwhile the run was ended before it had begun to train")


def test_node_when_it_cannot_read_the_folder_then_it_waits_and_says_so(cut_off):
    cut_off.run.rename(cut_off.run.with_name("away"))
    began = time.monotonic()
    assert cut_off.go(1.0) is None
    assert time.monotonic() - began >= 1.0
    assert f"within 1 s (--rendezvous-timeout), and {cut_off.run} cannot be read here either" in cut_off.nodes.lost


def test_node_when_the_lease_stands_still_after_the_run_ended_then_it_does_not_lead(cut_off):
    cut_off.ended = "the run was completed"
    assert cut_off.go() is None
    assert cut_off.nodes.lost.endswith("; meanwhile the run was completed")
    assert os.listdir(cut_off.run / ".leader").count("epoch-2") == 0


def test_node_when_the_lease_stands_still_then_it_leads(cut_off):
    found = cut_off.go()
    assert (found.keeps_memory, found.expected, cut_off.nodes.is_leader) == (True, {1}, True)
    cut_off.nodes.drop_all()


def test_node_when_the_round_begins_in_the_same_read_as_its_welcome_then_it_hears_of_both(cut_off):
    listener = ChannelListener(
        socket.AF_INET, ("127.0.0.1", 0), read_secret(cut_off.run / "secret", host="x", may_make=False)
    )
    assert cut_off.leader.claim(0, "127.0.0.1", listener.address[1])
    welcome = Welcome(leader=0, members=cut_off.nodes.members, folder=str(cut_off.run), term=2)
    begin = Round(number=4, port=1, members=cut_off.nodes.members, plan=RoundPlan())
    with closing(listener), renewed(cut_off.leader, after=0.5), ThreadPoolExecutor(1) as pool:
        letting_in = pool.submit(answer_together, listener, welcome, begin)
        assert cut_off.go() is not None
        cut_off.nodes.pump()
        cut_off.nodes.drop_all()
        letting_in.result()
    assert cut_off.nodes.next_round == begin


def carry(source: socket.socket, target: socket.socket, seconds: float) -> None:
    """Send on what comes, late, until it ends."""
    while data := source.recv(4096):
        time.sleep(seconds)
        target.sendall(data)
    target.close()


def test_node_when_the_leader_is_far_away_then_it_comes_back(cut_off, monkeypatch):
    monkeypatch.setattr(failover, "_CONNECT_SECONDS", CONNECT_SECONDS)
    listener = ChannelListener(
        socket.AF_INET, ("127.0.0.1", 0), read_secret(cut_off.run / "secret", host="x", may_make=False)
    )
    way = socket.create_server(("127.0.0.1", 0))
    assert cut_off.leader.claim(0, "127.0.0.1", way.getsockname()[1])

    def lead_there() -> None:
        here, _ = way.accept()
        with here, socket.create_connection(listener.address) as there, ThreadPoolExecutor(1) as pool:
            pool.submit(carry, there, here, 0.4)
            carry(here, there, 0.4)  # three ways: 1.2 s, and the connection itself is made at once

    with closing(listener), way, renewed(cut_off.leader, after=3.0), ThreadPoolExecutor(2) as pool:
        done = [pool.submit(lead_there)]
        welcome = Welcome(leader=0, members=cut_off.nodes.members, folder=str(cut_off.run), term=2)
        done.append(pool.submit(answer_together, listener, welcome))
        assert cut_off.go(3.0) is not None
        cut_off.nodes.drop_all()
        for one in done:
            one.result()


def test_node_when_it_is_asked_to_stop_then_it_stops_waiting(cut_off):
    began = time.monotonic()
    with renewed(cut_off.leader, after=0.6):
        assert cut_off.go(until=lambda: time.monotonic() - began > 0.5) is None
    assert time.monotonic() - began < 2.0
    assert cut_off.nodes.lost is None
