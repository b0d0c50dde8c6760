"""Verdicts over the ranks of several hosts: when they are certain, and what comes too late for them."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from dure.launch.hangs.diagnosis import HangVerdict
from dure.launch.hangs.rank_state import RankState
from dure.launch.nodes.member import Member
from dure.launch.nodes.messages import Survey, SurveyMessage
from dure.launch.nodes.round_state import RoundNews
from dure.launch.rounds import node_hang_survey as hang_survey
from dure.launch.rounds.node_hang_survey import HangSurvey
from tests.launch.hangs.test_hang import call, rank

Step = Callable[[], Sequence[RankState]]
WAITS, IS_GONE, HAS_MOVED = rank(0, call()), rank(1, exit_code=0), rank(1, call(), step=6)


@dataclass
class Node:
    """A launcher whose messages are carried by hand, as far as a joint look needs one."""

    node_rank: int
    looks: Step
    heard: dict[int, "Node"] = field(default_factory=dict)
    news: RoundNews = field(default_factory=RoundNews)
    leader: int = 0
    nothing: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.members = [Member(node_rank=rank, host="h", address="a", num_ranks=1) for rank in (0, 1)]
        self.is_leader = self.node_rank == self.leader
        self.look = HangSurvey(self, self.looks, lambda verdict, seconds: (verdict, True), self.nothing.append)

    def send_to_all(self, message: SurveyMessage) -> None:
        for node in self.heard.values():
            node.news.survey_messages.append((self.node_rank, copy.deepcopy(message)))

    def send_to_first(self, message: SurveyMessage) -> None:
        self.heard[0].news.survey_messages.append((self.node_rank, copy.deepcopy(message)))


def two(*theirs: RankState) -> list[Node]:
    """Return two nodes: rank 0 waits, and rank 1 is found so at each look."""
    states = iter(theirs)
    nodes = [Node(0, lambda: [WAITS]), Node(1, lambda: [next(states)])]
    nodes[0].heard, nodes[1].heard = {1: nodes[1]}, {0: nodes[0]}
    return nodes


def verdicts(nodes: list[Node], rounds: int = 4) -> list[tuple[HangVerdict, bool]]:
    found = (node.look.advance() for _ in range(rounds) for node in reversed(nodes))
    return [one for one in found if one is not None]


def test_verdict_when_it_is_certain_and_the_rank_has_moved_by_a_second_look_then_there_is_none():
    nodes = two(IS_GONE, HAS_MOVED)
    nodes[1].look.ask(12.0)
    assert verdicts(nodes) == []
    assert [node.nothing for node in nodes] == [[12.0], [12.0]]


def test_verdict_when_it_is_certain_and_a_second_look_finds_the_same_then_all_act_on_it():
    nodes = two(IS_GONE, IS_GONE)
    nodes[1].look.ask(12.0)
    found = verdicts(nodes)
    assert [(verdict.culprits, acts) for verdict, acts in found] == [((1,), True)] * 2
    assert [node.nothing for node in nodes] == [[], []]


@pytest.mark.parametrize("theirs", [[rank(1, busy_fraction=1.0)], [IS_GONE]])
def test_verdict_when_nothing_certain_follows_then_one_look_is_enough(theirs):
    nodes = two(*theirs)
    nodes[0].look.ask(12.0, is_confirmed=theirs != [IS_GONE])
    assert len(verdicts(nodes)) == 2


def test_verdict_when_the_rank_to_blame_does_not_answer_a_second_look_then_there_is_none(monkeypatch):
    monkeypatch.setattr(hang_survey, "_PATIENCE_SECONDS", 0.0)
    nodes = two(IS_GONE)
    nodes[0].look.ask(12.0)
    nodes[1].look.advance()
    assert nodes[0].look.advance() is None
    assert nodes[0].look.advance() is None
    assert nodes[0].nothing == [12.0]


def test_answer_when_it_belongs_to_an_earlier_look_then_it_is_left_out():
    nodes = two(replace(IS_GONE, exit_code=3), IS_GONE, IS_GONE)
    nodes[1].news.survey_messages.append((0, Survey(number=1)))
    nodes[1].look.advance()
    nodes[0].look.ask(12.0)
    assert len(nodes[0].look._states) == 1
    found = verdicts(nodes)
    assert "exit code 0" in found[0][0].text
