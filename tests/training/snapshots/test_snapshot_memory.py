"""A rank's snapshots in memory: one is whole at any moment, and what is read is what was written."""

import os
import signal
import time

import pytest
import torch

from dure.strategies.state.tensor_shard import TensorShard
from dure.training.checkpoints.rank_shard import RankShard
from dure.training.checkpoints.state import Position
from dure.training.snapshots.memory import (
    MOST_PLACES,
    ShareLayout,
    forget_after,
    newest_common,
    positions,
    read_share,
)
from dure.training.snapshots.writer import SnapshotWriter


@pytest.fixture
def memory():
    descriptor = os.memfd_create("snapshots")
    yield descriptor
    os.close(descriptor)


def at(step):
    return Position(samples_seen=8 * step, step=step, epoch=0)


def write(writer, share, step, trusted_samples=None):
    writer.write(ShareLayout(share), share.tensors(), share.state, at(step), trusted_samples)


def shard_of(weights, rank=0, **more):
    return RankShard(
        rank=rank,
        parts={"model": {"w": weights, "empty": torch.empty(0, 3)}, "optimizer": {}},
        per_rank={"torch": torch.arange(5, dtype=torch.uint8), **more},
        aliases={"tied": "w"},
        state=b'{"optimizer": {}}',
    )


def test_snapshot_when_read_then_it_is_what_was_written(memory):
    weights = torch.randn(3, 4, dtype=torch.float64).t()
    half = TensorShard(tensor=torch.randn(2, 2).bfloat16(), offsets=(2, 0), shape=(4, 2))
    share = shard_of(weights)
    share.parts["optimizer"]["momentum"] = half
    write(SnapshotWriter(memory), share, 3)
    assert positions(memory) == [at(3)]
    read = read_share(memory, at(3))
    assert (read.share.rank, read.share.aliases, read.share.state) == (0, {"tied": "w"}, share.state)
    assert torch.equal(read.share.parts["model"]["w"], weights)
    assert read.share.parts["model"]["empty"].shape == (0, 3)
    piece = read.share.parts["optimizer"]["momentum"]
    assert isinstance(piece, TensorShard)
    assert torch.equal(piece.tensor, half.tensor)
    assert (piece.offsets, piece.shape) == ((2, 0), (4, 2))
    assert read.share.per_rank["torch"].tolist() == [0, 1, 2, 3, 4]


def test_snapshots_when_written_again_and_again_then_the_last_two_are_there_with_their_values(memory):
    weights = torch.zeros(7)
    share = shard_of(weights)
    writer, layout = SnapshotWriter(memory), ShareLayout(share)
    for step in range(1, 6):
        weights.fill_(step)
        writer.write(layout, share.tensors(), b"x" * step * 100, at(step))
    assert sorted(positions(memory), key=lambda position: position.step) == [at(4), at(5)]
    for step in (4, 5):
        read = read_share(memory, at(step))
        assert torch.equal(read.share.parts["model"]["w"], torch.full((7,), float(step)))
        assert len(read.share.state) == 100 * step


def test_snapshot_when_it_grows_then_the_one_before_stays(memory):
    writer = SnapshotWriter(memory)
    write(writer, shard_of(torch.ones(3)), 1)
    write(writer, shard_of(torch.full((50_000,), 2.0)), 2)
    assert torch.equal(read_share(memory, at(1)).share.parts["model"]["w"], torch.ones(3))
    write(writer, shard_of(torch.full((90_000,), 3.0)), 3)
    assert torch.equal(read_share(memory, at(2)).share.parts["model"]["w"], torch.full((50_000,), 2.0))
    assert torch.equal(read_share(memory, at(3)).share.parts["model"]["w"], torch.full((90_000,), 3.0))


def test_ranks_when_one_is_a_step_ahead_then_the_newest_that_all_have_is_found(memory):
    other = os.memfd_create("snapshots")
    for descriptor, steps in ((memory, (1, 2, 3)), (other, (1, 2))):
        writer = SnapshotWriter(descriptor)
        for step in steps:
            write(writer, shard_of(torch.ones(2)), step)
    assert newest_common([memory, other]) == at(2)
    # the round that goes on from it writes over everything else first, and forgets it at once
    write(SnapshotWriter(memory, at(2)), shard_of(torch.ones(2)), 3)
    assert newest_common([memory, other]) == at(2)
    SnapshotWriter(memory, None)
    assert newest_common([memory, other]) is None
    os.close(other)
    assert newest_common([]) is None


def test_snapshot_when_it_is_the_newest_that_is_trusted_then_it_stays_beside_the_newest(memory):
    writer = SnapshotWriter(memory, num_places=MOST_PLACES)
    share = shard_of(torch.ones(2))
    there = []
    for step, trusted in ((1, 0), (2, 0), (3, 2), (4, 2), (5, 2), (6, 5), (7, 5), (8, 7)):
        write(writer, share, step, 8 * trusted)
        there.append(sorted(position.step for position in positions(memory)))
    assert there[2:] == [[1, 2, 3], [2, 3, 4], [2, 4, 5], [4, 5, 6], [5, 6, 7], [6, 7, 8]]


def test_snapshots_when_they_are_of_later_than_what_is_trusted_then_they_are_forgotten(memory):
    writer = SnapshotWriter(memory, num_places=MOST_PLACES)
    for step in (1, 2, 3):
        write(writer, shard_of(torch.ones(2)), step, 8)
    forget_after(memory, 16)
    assert newest_common([memory]) == at(2)
    forget_after(memory, 15)
    assert newest_common([memory]) == at(1)
    empty = os.memfd_create("snapshots")
    forget_after(empty, 0)
    os.close(empty)


@pytest.mark.parametrize("seed", range(5))
def test_writer_when_killed_at_any_moment_then_a_whole_snapshot_is_left(seed, memory):
    pid = os.fork()
    if pid == 0:
        weights = torch.zeros(200_000)
        share = shard_of(weights)
        writer, layout = SnapshotWriter(memory), ShareLayout(share)
        for step in range(1, 10**9):
            weights.fill_(step)
            writer.write(layout, share.tensors(), str(step).encode(), at(step))
    deadline = time.monotonic() + 30
    while not positions(memory) and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.01 + 0.0037 * seed)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found = positions(memory)
    assert found
    for position in found:
        read = read_share(memory, position)
        assert read.share.state == str(position.step).encode()
        assert torch.equal(read.share.parts["model"]["w"], torch.full((200_000,), float(position.step)))
