"""Choice of the snapshot from which several hosts go on: one that all have, whole, of one history."""

import os

import pytest
import torch

from dure.cluster.rank import RankInfo
from dure.comm.groups import Group, Solo
from dure.process.context import Place
from dure.strategies.state.tensor_shard import Needs, Rectangle, TensorShard
from dure.training.checkpoints.rank_shard import RankShard
from dure.training.checkpoints.state import Position
from dure.training.snapshots.exchange import Found, Survey, collect
from dure.training.snapshots.memory import (
    PIECES,
    WHOLE,
    Origin,
    Packed,
    ShareLayout,
    packed_share,
)
from dure.training.snapshots.writer import SnapshotWriter

STATE = b'{"optimizer": {"state": {}, "groups": [{"lr": 0.5}]}, "model_extra": {}, "extra": 7}'


class Said(Solo):
    """A group whose ranks have said something."""

    def __init__(self, said: list) -> None:
        self.said, self.rank, self.world_size = said, 0, len(said)

    def all_gather_json(self, message: object) -> list:
        return self.said


def at(step: int) -> Position:
    return Position(samples_seen=8 * step, step=step, epoch=0)


def entry(step: int, rank: int, *, round_number: int = 0, world_size: int = 2, kind: int = WHOLE) -> list[int]:
    return [8 * step, step, 0, round_number, world_size, rank, kind]


def surveyed(*said: tuple[int, list[list[int]]]) -> Survey:
    place = Place(rank=RankInfo(), threads=1, is_supervised=True)
    descriptor = os.memfd_create("none")
    try:
        return Survey(Said(list(said)), place, descriptor)
    finally:
        os.close(descriptor)


def steps(survey: Survey) -> list[int]:
    return [found.position.step for found in survey.candidates()]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([(0, [entry(4, 0), entry(5, 0)]), (1, [entry(4, 1), entry(3, 1)])], [4]),
        ([(0, [entry(4, 0), entry(5, 0)]), (1, [])], [5, 4]),
        ([(0, [entry(4, 1, kind=0)])], []),
        ([(0, [entry(4, 0, kind=PIECES)]), (1, [entry(4, 1, kind=PIECES)])], [4]),
        ([(0, [entry(4, 0, kind=PIECES)])], []),
        ([(0, [entry(4, 0)]), (1, [entry(4, 0, round_number=1)])], [4]),
        ([(0, [entry(4, 0), entry(5, 0, round_number=1)]), (1, [entry(5, 1, round_number=1)])], [5, 4]),
        ([(0, [entry(5, 0)]), (1, [entry(4, 0)])], []),
    ],
    ids=["newest-of-all", "newcomer", "no-whole", "all-pieces", "piece-lost", "came-later", "next-round", "apart"],
)
def test_survey_when_ranks_hold_snapshots_then_those_of_all_are_candidates(said, expected):
    assert steps(surveyed(*said)) == expected


def test_survey_when_a_host_holds_nothing_then_a_whole_share_is_sent():
    survey = surveyed((0, []), (1, [entry(4, 1)]), (1, [entry(4, 2, kind=0)]))
    (found,) = survey.candidates()
    assert survey.to_send(found) == [1]
    assert not survey.is_everybodys(found)


def test_survey_when_every_host_has_a_whole_share_then_nothing_is_sent():
    survey = surveyed((0, [entry(4, 0)]), (1, [entry(4, 1)]))
    (found,) = survey.candidates()
    assert survey.to_send(found) == []
    assert survey.is_everybodys(found)


class Sends(Said):
    """A group in which other ranks send their shares, in the order of their ranks."""

    def __init__(self, said: list, packed: dict[int, Packed]) -> None:
        super().__init__(said)
        self.answers = [said]
        for rank, one in packed.items():
            message = [one.numbers, len(one.head), len(one.data)]
            self.answers.append([message if rank == number else None for number in range(max(packed) + 1)])
        self.broadcasts = [(rank, one.head) for rank, one in packed.items()]
        self.broadcasts += [(rank, one.data) for rank, one in packed.items()]

    def all_gather_json(self, message: object) -> list:
        return self.answers.pop(0)

    def broadcast_bytes(self, data: bytearray, source_rank: int) -> None:
        rank, sent = self.broadcasts.pop(0)
        assert (rank, len(sent)) == (source_rank, len(data))
        data[:] = sent


@pytest.fixture
def memories():
    descriptors = [os.memfd_create("snapshots") for _ in range(3)]
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def write(descriptor: int, share: RankShard, origin: Origin, *, is_spread: bool = False) -> None:
    layout = ShareLayout(share, is_spread=is_spread)
    SnapshotWriter(descriptor, origin=origin).write(layout, share.tensors(), share.state, at(4))


PLACE = Place(rank=RankInfo(world_size=2), threads=1, is_supervised=True)


def test_newcomer_when_it_holds_nothing_then_it_gets_the_state_of_another_host(memories):
    mine, theirs, _ = memories
    share = RankShard(rank=1, parts={"model": {"w": torch.arange(3.0)}, "optimizer": {}}, per_rank={}, state=STATE)
    write(theirs, share, Origin(round=2, world_size=3, rank=1))
    said = [(0, []), (1, [entry(4, 1, round_number=2, world_size=3)])]
    group: Group = Sends(said, {1: packed_share(theirs, at(4), 2)})
    survey = Survey(group, PLACE, mine)
    found = Found(position=at(4), round=2, world_size=3)
    assert survey.candidates() == [found]
    needs = Needs(model={"w": Rectangle((0,), (3,))}, optimizer={})
    checkpoint = collect(group, PLACE, [mine], survey, found, needs)
    assert torch.equal(checkpoint.weights()["w"], torch.arange(3.0))
    assert (checkpoint.extra, checkpoint.optimizer["groups"]) == (7, [{"lr": 0.5}])
    assert checkpoint.per_rank(2) is None


def rows(rank: int) -> RankShard:
    """Return one of three rows of a weight, and of the optimiser's state of it."""
    row = torch.full((1, 5), float(rank))
    parts = {
        part: {name: TensorShard(tensor=row + add, offsets=(rank, 0), shape=(3, 5))}
        for part, name, add in (("model", "w", 0), ("optimizer", "optimizer.state.w.m", 10))
    }
    state = b'{"optimizer": {"state": {"w": {"m": {"$tensor": "optimizer.state.w.m"}}}}, "model_extra": {}, "extra": 7}'
    return RankShard(rank=rank, parts=parts, per_rank={}, state=state if rank == 0 else b"")


def test_rank_when_shares_of_pieces_are_sent_keeps_what_it_needs_alone(memories):
    mine = memories[0]
    for rank, descriptor in enumerate(memories):
        write(descriptor, rows(rank), Origin(round=2, world_size=3, rank=rank))
    held = [entry(4, rank, round_number=2, world_size=3, kind=PIECES) for rank in range(3)]
    packed = {rank: packed_share(memories[rank], at(4), 2) for rank in range(3)}
    group = Sends([(rank, [held[rank]]) for rank in range(3)], packed)
    # rank 0 holds its own share, and now needs parts of the other two
    survey = Survey(group, PLACE, mine)
    found = Found(position=at(4), round=2, world_size=3)
    part = Rectangle((1, 1), (2, 3))
    checkpoint = collect(group, PLACE, [mine], survey, found, Needs(model={"w": part}, optimizer={"w": part}))
    assert checkpoint._saved("model", "w").part(part).tolist() == [[1.0] * 3, [2.0] * 3]
    assert checkpoint._saved("optimizer", "optimizer.state.w.m").part(part).tolist() == [[11.0] * 3, [12.0] * 3]
    received = [piece for pieces in checkpoint._held["model"].values() for piece in pieces if piece.offsets[0] > 0]
    assert [piece.tensor.untyped_storage().nbytes() for piece in received] == [3 * 4] * 2
    assert not group.broadcasts
