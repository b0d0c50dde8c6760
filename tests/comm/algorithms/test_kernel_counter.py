"""The counted bytes against the kernel's own counter, in a network where nobody else sends."""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dure.comm.algorithms.base import AllReduce
from dure.comm.algorithms.opening import open_all_reduce
from tests.comm.algorithms.all_reduce_cases import OVER_SOCKETS, hosts_of
from tests.comm.gloo_ranks import on_ranks
from tests.comm.network_namespace import enter, loopback_bytes, why_not

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

VECTOR_BYTES = 4 * 2**20
HEADERS = 0.01
"""TCP/IP headers and acknowledgements on packets of up to 64 KiB, and gloo's handshakes: allowed is one percent."""

TRIES = 5
"""The least of so many counts: where processes wait for a core, TCP sends smaller packets and more of them."""


def in_own_network(work: Callable[[], Any]) -> Any:
    """Return what `work` returned in a forked process with a network of its own."""
    here, there = multiprocessing.get_context("fork").Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            enter()
            there.send(work())
        finally:
            os._exit(0)
    there.close()
    answer = here.recv() if here.poll(100) else None
    os.waitpid(pid, 0)
    here.close()
    return answer


def measure(group: Any) -> dict[str, tuple[int, int, int]]:
    """Return per algorithm what this rank counted and what the kernel did meanwhile, received and sent."""
    measured = {}
    for name in OVER_SOCKETS:
        algorithm = open_all_reduce(name, hosts=hosts_of(group.world_size))
        measured[name] = min((_measure_once(group, algorithm) for _ in range(TRIES)), key=lambda seen: seen[2])
    return measured


def _measure_once(group: Any, algorithm: AllReduce) -> tuple[int, int, int]:
    vector = torch.ones(VECTOR_BYTES // 4)
    group.barrier()
    counted, (received, sent) = algorithm.sent_bytes, loopback_bytes()
    group.barrier()
    algorithm.all_reduce(vector)
    group.barrier()
    received_after, sent_after = loopback_bytes()
    group.barrier()
    return algorithm.sent_bytes - counted, received_after - received, sent_after - sent


@pytest.mark.parametrize("world_size", [2, 4])
def test_counted_bytes_are_those_that_the_kernel_saw_on_the_loopback_interface(world_size: int) -> None:
    by_rank = in_own_network(lambda: on_ranks(world_size, measure))
    for name in OVER_SOCKETS:
        counted = sum(answer[name][0] for answer in by_rank)
        _, received, sent = by_rank[0][name]
        assert received == sent, name  # what goes out of it comes in again
        assert counted < sent <= (1 + HEADERS) * counted, (name, counted, sent)


def test_own_network_has_a_counter_that_only_its_own_processes_move() -> None:
    assert in_own_network(lambda: loopback_bytes()) == (0, 0)
