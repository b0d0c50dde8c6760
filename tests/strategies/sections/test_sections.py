"""Cuts of a model: the possible ones, and the best."""

import dataclasses
import itertools
import random
import re

import pytest
import torch
from torch import nn

from dure.strategies.sections.cuts import (
    Barrier,
    Chain,
    balanced,
    begins_of,
    find_blocks,
    is_container,
    registered_chain,
)
from dure.strategies.sections.cuts import faults_of as faults_with_cure
from examples.char_gpt import GPT


def faults_of(model, num_sections, cuts=None):
    return faults_with_cure(registered_chain(model), num_sections, cuts, "ddp or fsdp")


def layers(number):
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(number)))


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3))
        self.norm = nn.LayerNorm(2)


class Wrapped(nn.Module):
    """A stem, a body of blocks that has most of the parameters, a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(2, 2)
        self.body = Body()
        self.head = nn.Linear(2, 2)


def test_blocks_are_what_containers_hold_and_what_stands_beside_them():
    assert list(find_blocks(Wrapped())) == [
        "stem", "body.blocks.0.0", "body.blocks.0.1", "body.blocks.1.0", "body.blocks.1.1", "body.blocks.2.0",
        "body.blocks.2.1", "body.norm", "head",
    ]  # fmt: skip


def test_blocks_of_nested_containers_are_those_inside_and_a_block_stays_whole():
    gpt = GPT(9, layers=2, heads=1, width=4, context=3, dropout=0.0)
    model = nn.Sequential(nn.ModuleDict({"a": layers(2)})["a"], nn.TransformerEncoderLayer(4, 2), gpt)
    assert list(find_blocks(model)) == ["0.0", "0.1", "1", "2"]


def test_a_sequential_with_a_forward_of_its_own_is_a_block():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    assert is_container(layers(2))
    assert not is_container(Residual(nn.Linear(2, 2)))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_weights_keep_everything_between_them_together(device):
    with torch.device(device):
        gpt = GPT(9, layers=2, heads=1, width=4, context=3, dropout=0.0)
    fault = "cannot be cut (embedding.weight and head.weight are one and the same parameter), but 2 sections are wanted"
    assert faults_of(gpt, 1) == []
    assert fault in faults_of(gpt, 2)[0]
    assert faults_of(gpt, 2)[0].endswith("use ddp or fsdp")
    assert "no section can begin with head: embedding.weight and head.weight are one" in faults_of(gpt, 2, ["head"])[0]


@pytest.mark.parametrize(
    ("model", "num_sections", "said"),
    [
        (nn.Linear(2, 2), 2, "Linear has no place to cut: .* and it has none; use ddp or fsdp"),
        (layers(1), 2, r"Sequential has no place to cut: .* and it has one \(0\); use ddp or fsdp"),
        (layers(3), 4, r"3 blocks \(0, 1, 2\) and can be cut into at most 3 sections, but 4 sections are"),
        (layers(20), 21, r"\(0, 1, 2, 3, 4, 5, \.\.\. 14, 15, 16, 17, 18, 19\)"),
    ],
)
def test_a_model_with_too_few_blocks_is_refused_with_their_names(model, num_sections, said):
    (fault,) = faults_of(model, num_sections)
    assert re.search(said, fault)


@pytest.mark.parametrize(
    ("cuts", "said"),
    [
        (["blocks.1", "blocks.2"], "cuts names 2 module(s) (blocks.1, blocks.2), which makes 3 sections, but 2 are"),
        (
            ["blocks.1.mlp_in"],
            "cuts names blocks.1.mlp_in, which is inside the block blocks.1: a cut is before a whole",
        ),
        (["nothing"], "cuts names nothing, but the blocks of GPT are embedding, position, blocks.0, blocks.1"),
        ([], "cuts names 0 module(s)"),
    ],
)
def test_cuts_that_are_none_are_refused_by_name(cuts, said):
    gpt = GPT(9, layers=2, heads=1, width=4, context=3, dropout=0.0)
    gpt.head.weight = nn.Parameter(gpt.head.weight.detach().clone())
    assert said in " ".join(faults_of(gpt, 2, cuts))
    assert faults_of(gpt, 2, ["blocks.1"]) == faults_of(gpt, 2, ["blocks"]) == []


def test_cuts_in_another_order_or_twice_are_refused_once_the_order_is_known():
    chain = Chain(model="M", calls=("a", "b", "c", "d"))
    registered = dataclasses.replace(chain, is_seen=False)
    for cuts in (["c", "b"], ["b", "b"]):
        assert "calls them in another order, or one is named twice" in faults_with_cure(chain, 3, cuts, "ddp")[0]
    assert "with which the first section begins anyway" in faults_with_cure(chain, 2, ["a"], "ddp")[0]
    # a head that is registered first may be called last
    assert faults_with_cure(registered, 3, ["c", "b"], "ddp") == faults_with_cure(registered, 2, ["a"], "ddp") == []
    assert "is named twice" in faults_with_cure(registered, 3, ["b", "b"], "ddp")[0]


def test_given_cuts_are_kept_and_a_container_means_its_first_block():
    chain = registered_chain(nn.Sequential(layers(2), layers(3)))
    assert begins_of(chain, 2, ["1"], []) == [0, 2]
    assert begins_of(chain, 3, ["0.1", "1.2"], []) == [0, 1, 4]


def test_balanced_cuts_are_the_best_there_are():
    draw = random.Random(0)
    for _ in range(60):
        costs = [draw.randint(0, 9) for _ in range(draw.randint(2, 8))]
        places = sorted(draw.sample(range(1, len(costs)), draw.randint(1, len(costs) - 1)))
        for number in range(1, len(places) + 2):

            def costliest(begins, costs=costs):
                return max(sum(costs[a:b]) for a, b in itertools.pairwise([*begins, len(costs)]))

            best = min(costliest([0, *cuts]) for cuts in itertools.combinations(places, number - 1))
            begins = balanced(costs, places, number)
            assert begins[0] == 0
            assert len(begins) == number
            assert set(begins[1:]) <= set(places)
            assert costliest(begins) == best


def test_a_chain_offers_places_outside_of_its_barriers_only():
    chain = Chain(model="M", calls=("a", "b", "c", "d"), barriers=(Barrier(first=0, last=2, why="tied"),))
    assert chain.places() == [3]
    assert [chain.why_not(position) for position in (1, 2, 3)] == ["tied", "tied", None]
