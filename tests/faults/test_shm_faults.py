"""Ranks of `dure_shm` that are killed or stopped: the others say who, in time, and nothing stays behind."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dure.errors import PeerLost
from dure.failures.report import is_peer_lost
from dure.torchcompat.collectives import all_gather_single
from tests.comm.gloo_ranks import on_ranks

pytestmark = pytest.mark.faults

TIMEOUT_SECONDS = 3.0


def shared_names():
    return set(os.listdir("/dev/shm"))


def lose(how, call):
    """Return what `call` raises on the ranks that are left of three when rank 1 gets a signal, and after how long."""

    def work(group):
        dist.barrier()
        if group.rank == 1:
            if how == signal.SIGSTOP and os.fork() == 0:
                os.setpgid(0, 0)
                time.sleep(3 * TIMEOUT_SECONDS)  # somebody has to wake it
                os.kill(os.getppid(), signal.SIGKILL)
                os._exit(0)
            os.kill(os.getpid(), how)
        start = time.monotonic()
        try:
            call(group)
        except Exception as error:
            error.seconds = time.monotonic() - start
            raise

    return on_ranks(3, work, timeout_seconds=TIMEOUT_SECONDS, backend="cpu:dure_shm")


def reduce_in_turn(group):
    dist.all_reduce(torch.ones(10))


def reduce_beside(group):
    works = [dist.all_reduce(torch.ones(1_000_000), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()


def gather(group):
    all_gather_single(torch.empty(3_000_000), torch.ones(1_000_000))


@pytest.mark.parametrize("call", [reduce_in_turn, reduce_beside, gather])
def test_rank_when_killed_then_the_others_name_it_long_before_the_timeout(call, capfd):
    answers = lose(signal.SIGKILL, call)
    assert answers[1] is None
    for rank in (0, 2):
        error = answers[rank]
        assert isinstance(error, PeerLost)
        assert isinstance(error, RuntimeError)
        assert " closed " in str(error)
        assert is_peer_lost(error)
        assert str(error).startswith("rank 1 (process ")
        assert f"ended while rank {rank} waited in " in str(error)
        assert error.seconds < TIMEOUT_SECONDS


def test_rank_when_stopped_then_the_others_name_it_after_the_timeout(capfd):
    answers = lose(signal.SIGSTOP, reduce_in_turn)
    for rank in (0, 2):
        error = answers[rank]
        assert isinstance(error, PeerLost)
        assert str(error).startswith("rank 1 did not come within 3 s")
        assert TIMEOUT_SECONDS <= error.seconds < 2 * TIMEOUT_SECONDS


def test_rank_when_killed_in_ddps_backward_then_its_number_comes_through_torch(capfd):
    def work(group):
        model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
        model(torch.ones(2, 8)).sum().backward()
        loss = model(torch.ones(2, 8)).sum()
        if group.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()

    error, _ = on_ranks(2, work, timeout_seconds=TIMEOUT_SECONDS, backend="cpu:dure_shm")
    assert type(error) is RuntimeError
    assert "PeerLost: rank 1 (process " in str(error)
    assert is_peer_lost(error)


def test_rank_when_it_raises_then_the_others_say_that_it_left(capfd):
    def work(group):
        if group.rank == 1:
            dist.destroy_process_group()
            raise ValueError("out of luck")
        dist.all_reduce(torch.ones(1))

    before = shared_names()
    lost, cause = on_ranks(2, work, timeout_seconds=TIMEOUT_SECONDS, backend="cpu:dure_shm")
    assert isinstance(lost, PeerLost)
    assert "rank 1 left the group while rank 0 waited in all_reduce(sum) of 4 bytes float32" in str(lost)
    assert isinstance(cause, ValueError)
    assert shared_names() == before


def test_shared_memory_when_all_ranks_are_killed_then_nothing_is_left(tmp_path: Path, capfd):
    def work(group):
        vector = torch.ones(3_000_000)
        for step in range(10**9):
            dist.all_reduce(vector, dist.ReduceOp.MAX)
            if step == 3:
                (tmp_path / f"{group.rank} runs").touch()

    before = shared_names()
    shepherd = os.fork()
    if shepherd == 0:
        os.setpgid(0, 0)
        on_ranks(3, work, timeout_seconds=30.0, backend="cpu:dure_shm")
        os._exit(0)
    try:
        deadline = time.monotonic() + 60.0
        while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(list(tmp_path.iterdir())) == 3
        assert shared_names() == before
    finally:
        os.killpg(shepherd, signal.SIGKILL)  # it and its ranks at the same moment
        os.waitpid(shepherd, 0)
    assert shared_names() == before
