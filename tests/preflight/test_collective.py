"""A real collective: ranks that come through, and ranks that do not."""

import time
from pathlib import Path

import pytest

from dure.comm.entrypoints.preflight import partners
from dure.failures.verdict import WorkerEnd
from dure.preflight.collective import RankProgress, backend_of, judged, try_collective
from dure.preflight.findings import Finding
from dure.preflight.settings import PreflightSettings
from tests.record_cases import failure_of

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 60.0
"""More than any of them takes to start on a busy machine: these ends do not wait for it."""
STOPPED_SECONDS = 20.0
"""The same where the limit is what ends them."""


def tried(deed: str, num_ranks: int = 3, backend: str = "gloo", limit_seconds: float = LIMIT_SECONDS) -> Finding:
    settings = PreflightSettings(
        num_ranks=num_ranks,
        num_devices=num_ranks,
        device="cpu",
        backend=backend,
        threads=1,
        timeout_seconds=limit_seconds,
    )
    (found,) = try_collective(settings, ["a"], lambda mine: [mine], entry="tests.preflight.odd_rank")
    return found


@pytest.fixture
def odd(monkeypatch):
    """Let a rank do something on purpose."""
    monkeypatch.chdir(ROOT)

    def try_with(deed: str, **settings) -> Finding:
        monkeypatch.setenv("ODD_RANK", deed)
        return tried(deed, **settings)

    return try_with


@pytest.mark.parametrize("backend", ["gloo", pytest.param("dure_shm", marks=pytest.mark.slow)])
def test_ranks_when_all_is_well_then_every_pair_comes_through(odd, backend):
    found = odd("be late:1", num_ranks=3, backend=backend)
    assert found.status == "ok", found.text
    assert f"over {'cpu:' * (backend == 'dure_shm')}{backend}: sums right, 3 broadcasts, 3 pair(s)" in found.seen


@pytest.mark.slow
def test_seconds_when_nodes_measured_different_ones_then_all_report_the_longest(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("ODD_RANK", "be late:1")
    settings = PreflightSettings(
        num_ranks=2, num_devices=2, device="cpu", backend="gloo", threads=1, timeout_seconds=LIMIT_SECONDS
    )

    def with_a_slower_node(mine):
        return [mine, {**mine, "seconds": 100.0, "ranks": []}]

    (found,) = try_collective(settings, ["a", "b"], with_a_slower_node, entry="tests.preflight.odd_rank")
    assert found.status == "ok", found.text
    assert found.seen.endswith("all in 1:40")


def test_rank_when_it_adds_up_wrongly_then_it_is_named_with_both_values(odd):
    found = odd("compute wrongly:1")
    assert found.status == "failure"
    assert found.seen.startswith(
        "rank 1 got a wrong result of all_reduce of 8 B: 1 element(s), the first (number 1) is 1 and must be 0; 1 more"
    )


@pytest.mark.faults
@pytest.mark.parametrize("backend", ["gloo", "dure_shm"])
def test_rank_when_it_is_stopped_then_it_is_named_within_the_limit(odd, backend):
    began = time.monotonic()
    found = odd("stop:2", backend=backend, limit_seconds=STOPPED_SECONDS)
    assert time.monotonic() - began < STOPPED_SECONDS + 3
    assert found.status == "failure"
    assert found.seen.startswith("rank 2 did not come through broadcast from rank ")
    assert "waited for it in " in found.seen
    assert "a process of rank 2 is stopped" in found.cure


@pytest.mark.faults
def test_ranks_when_all_are_stopped_then_they_are_ended_at_the_limit(odd):
    began = time.monotonic()
    found = odd("stop before it begins:all", num_ranks=2, limit_seconds=1.0)
    assert time.monotonic() - began < 10
    assert found.seen == "rank 0, rank 1 did not come through starting within 1 s"


@pytest.mark.faults
def test_rank_when_it_is_killed_then_it_is_named(odd):
    found = odd("kill:0")
    assert found.seen.startswith("rank 0 failed in broadcast from rank 0: killed (SIGKILL)")


@pytest.mark.faults
def test_rank_when_it_fails_then_its_own_words_are_told(odd):
    found = odd("fail:1")
    assert "rank 1 failed in send and receive between rank " in found.seen
    assert "RuntimeError: CUDA error: an illegal memory access was encountered" in found.seen


def lost(rank: int, time_: float) -> WorkerEnd:
    failure = failure_of(rank, is_consequence=True, type="RuntimeError", message="Timed out waiting")
    return WorkerEnd(rank=rank, exit_code=1, time=time_, was_stopped=False, failure=failure)


def test_two_ranks_when_they_lose_each_other_then_both_are_named_with_their_hosts():
    at = "send and receive between rank 0 and rank 1"
    ranks = [RankProgress(rank=rank, done=("meeting the others",), at=at) for rank in range(2)]
    (found,) = judged(
        ranks, [lost(0, 1.0), lost(1, 1.1)], ["node 0 (a, 1.2.3.4)", "node 1 (b, 1.2.3.5)"], 30, "gloo", 9
    )
    assert found.pair == ("rank 0 on node 0 (a, 1.2.3.4)", "rank 1 on node 1 (b, 1.2.3.5)")
    assert found.seen == f"{found.pair[0]}, {found.pair[1]} did not come through {at} within 30 s"
    assert "look at the network between them" in found.cure


def test_rank_when_it_is_stopped_and_nobody_has_time_left_to_say_so_then_it_is_named():
    at = "broadcast from rank 0"
    ranks = [RankProgress(rank=rank, done=("all_reduce of 8 B",), at=at) for rank in range(3)]
    ends = [WorkerEnd(rank=rank, exit_code=-9, time=9, was_stopped=True, was_held=rank == 2) for rank in range(3)]
    (found,) = judged(ranks, ends, [""] * 3, 8, "gloo", 8)
    assert found.seen == f"rank 2 did not come through {at}; rank 0 waited for it in {at}; rank 1 waited for it in {at}"
    assert found.cure.startswith("a process of rank 2 is stopped (SIGSTOP, or a debugger)")


def test_rank_when_nccl_aborts_those_that_waited_for_it_then_it_is_named_and_not_they():
    ranks = [RankProgress(rank=rank, done=("meeting the others",), at="all_reduce of 8 B") for rank in range(3)]
    ends = [WorkerEnd(rank=rank, exit_code=-6, time=rank, was_stopped=False) for rank in (0, 2)]
    ends.append(WorkerEnd(rank=1, exit_code=-9, time=9, was_stopped=True))
    (found,) = judged(ranks, ends, [""] * 3, 30, "nccl", 20)
    assert found.seen.startswith("rank 1 did not come through all_reduce of 8 B; rank 0 waited for it")


@pytest.mark.parametrize("world_size", range(1, 12))
def test_partners_when_all_meet_in_their_order_then_nobody_waits_in_a_circle(world_size):
    orders = [list(partners(rank, world_size)) for rank in range(world_size)]
    assert [sorted(order) for order in orders] == [
        [other for other in range(world_size) if other != rank] for rank in range(world_size)
    ]
    while any(orders):
        met = [(rank, o[0]) for rank, o in enumerate(orders) if o and orders[o[0]][0] == rank]
        assert met, "all wait"
        for rank, _partner in met:
            orders[rank].pop(0)


@pytest.mark.parametrize(
    ("device", "backend", "num_nodes", "chosen"),
    [
        ("cpu", "auto", 1, "cpu:dure_shm"),
        ("cpu", "auto", 2, "gloo"),
        ("cuda", "auto", 2, "nccl"),
        ("cuda", "gloo", 1, "gloo"),
        ("cpu", "dure_shm", 1, "cpu:dure_shm"),
    ],
)
def test_backend_when_chosen_then_is_that_of_a_run(device, backend, num_nodes, chosen):
    from dure.launch.nodes.rendezvous import NodeSettings

    several = None if num_nodes == 1 else NodeSettings(num_nodes=num_nodes, node_rank=0, rendezvous="10.0.0.1")
    settings = PreflightSettings(num_ranks=2, num_devices=2, device=device, backend=backend, several=several)
    assert backend_of(settings, 2 * num_nodes) == chosen
