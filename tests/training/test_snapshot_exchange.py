"""Which snapshot ranks of several hosts go on from: one that all have, whole, of one history."""

import os

import pytest
import torch

from dure.comm.groups import Group, Solo
from dure.place import Place
from dure.rank import RankInfo
from dure.training.checkpoint_share import Share
from dure.training.snapshot import Position
from dure.training.snapshot_exchange import Found, Survey, collect
from dure.training.snapshot_memory import PIECES, WHOLE, Origin, ShareLayout, SnapshotWriter

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
    """A group in which another rank sends its share."""

    def __init__(self, said: list, numbers: list[int], data: bytes) -> None:
        super().__init__(said)
        self.answers, self.data = [said, [None, [numbers, len(data)]]], data

    def all_gather_json(self, message: object) -> list:
        return self.answers.pop(0)

    def broadcast_bytes(self, data: bytearray, source_rank: int) -> None:
        assert source_rank == 1
        data[:] = self.data


def test_newcomer_when_it_holds_nothing_then_it_gets_the_state_of_another_host():
    from dure.training.snapshot_memory import packed_share

    mine, theirs = os.memfd_create("mine"), os.memfd_create("theirs")
    try:
        share = Share(rank=1, parts={"model": {"w": torch.arange(3.0)}, "optimizer": {}}, per_rank={}, state=STATE)
        writer = SnapshotWriter(theirs, origin=Origin(round=2, world_size=3, rank=1))
        writer.write(ShareLayout(share), share.tensors(), STATE, at(4))
        group: Group = Sends(
            [(0, []), (1, [entry(4, 1, round_number=2, world_size=3)])], *packed_share(theirs, at(4), 2)
        )
        place = Place(rank=RankInfo(world_size=2), threads=1, is_supervised=True)
        survey = Survey(group, place, mine)
        found = Found(position=at(4), round=2, world_size=3)
        assert survey.candidates() == [found]
        checkpoint = collect(group, place, [mine], survey, found)
    finally:
        os.close(mine)
        os.close(theirs)
    assert torch.equal(checkpoint.weights()["w"], torch.arange(3.0))
    assert (checkpoint.extra, checkpoint.optimizer["groups"]) == (7, [{"lr": 0.5}])
    assert checkpoint.per_rank(2) is None
