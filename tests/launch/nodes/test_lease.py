"""The leader's lease: one node holds it at a time, and one that has lost it notices."""

import time

import pytest

from dure.errors import CheckpointNotWritten
from dure.launch.nodes import leader_lease as lease_module
from dure.launch.nodes.leader_lease import Lease, live_leader
from dure.records.leader_term import newest_term, refuse_if_over


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 0.0)
    monkeypatch.setattr(lease_module, "STALE_SECONDS", 0.3)


@pytest.fixture
def leading(tmp_path) -> Lease:
    lease = Lease(tmp_path)
    assert lease.claim(0, "10.0.0.1", 29400)
    lease.renew(3)
    return lease


def test_lease_when_it_is_written_then_others_read_who_leads(leading, tmp_path):
    found = Lease(tmp_path).read()
    assert found is not None
    assert (found.term, found.node_rank, found.address, found.port, found.round) == (1, 0, "10.0.0.1", 29400, 3)


def test_term_when_two_claim_the_next_then_only_one_has_it(leading, tmp_path):
    one, other = Lease(tmp_path), Lease(tmp_path)
    assert [one.claim(1, "a", 1, after=1), other.claim(2, "b", 1, after=1)] == [True, False]
    assert newest_term(tmp_path) == 2


def test_leader_when_another_has_taken_over_then_it_notices_and_writes_no_more(leading, tmp_path):
    other = Lease(tmp_path)
    assert other.claim(1, "10.0.0.2", 29400, after=1)
    other.renew(4)
    leading.renew(3)
    assert leading.is_deposed
    leading.give_up()
    assert Lease(tmp_path).read().node_rank == 1


def test_watcher_when_the_counter_moves_then_it_sees_a_leader_and_otherwise_none(leading, tmp_path):
    watcher = Lease(tmp_path)
    watcher.unchanged_seconds()
    time.sleep(0.05)
    assert watcher.unchanged_seconds() >= 0.05
    leading.renew(3)
    assert watcher.unchanged_seconds() < 0.05
    assert live_leader(tmp_path) is None


def test_lease_when_it_is_torn_then_it_is_no_news(leading, tmp_path):
    (tmp_path / ".leader/lease.json").write_text('{"epoch": 1, "node')
    assert Lease(tmp_path).read() is None


def test_lease_when_the_run_is_over_then_nobody_leads(leading, tmp_path):
    leading.give_up()
    assert Lease(tmp_path).read() is None
    assert newest_term(tmp_path) == 1


def test_writing_when_a_later_term_has_begun_then_it_is_refused(leading, tmp_path):
    refuse_if_over(tmp_path, 1)
    refuse_if_over(tmp_path, None)
    Lease(tmp_path).claim(1, "a", 1)
    with pytest.raises(CheckpointNotWritten, match=r"another node leads .* since nothing was seen of this one"):
        refuse_if_over(tmp_path, 1)
